"""Worker processes, how processes end, how malloc reuses memory and how threads wait."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

from paceline.errors import GenerationError, PacelineError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence
    from pathlib import Path

Item = TypeVar("Item")

_END_S = 60  # seconds in which a worker may end
MOST_DEATHS = 3  # deaths of a process in a row that end the work
# mallopt parameters, as numbered in glibc's malloc.h
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4
_PAD_BYTES = 64 << 20
_PR_SET_PDEATHSIG = 1  # of prctl
_SPINS = ("GOMP_SPINCOUNT", "3000")
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def in_processes(
    work: Callable[[Item], object], items: Sequence[Item], workers: int
) -> Iterator[Item]:
    """Yield each item when `work(item)` is done, in order of completion.

    If a process dies (out of memory, for example), all are started again, and unfinished items too.

    Args:
        work: Pickled and sent to each process once; it may cache what it loads.
        items: The work items.
        workers: Number of processes; they share this process's cores.

    Raises:
        PacelineError: raised by `work`.
        GenerationError: another error of `work`, or processes died MOST_DEATHS times in a row.
    """
    import torch  # the command line must answer --help without it

    # processes are copied from one that has imported what they need, so that later ones start fast
    context = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
    context.set_forkserver_preload(["transformers.modeling_utils", type(work).__module__])
    threads = max(1, torch.get_num_threads() // workers)
    waiting, deaths = list(items), 0
    while waiting:
        start = work, context.Value("i"), threads, dict(os.environ)
        pool = ProcessPoolExecutor(workers, context, _begin, start)
        try:
            with ignoring_working_directory():
                running = {pool.submit(_work_on, item): item for item in waiting}
            for future in as_completed(running):
                future.result()
                waiting.remove(running[future])
                deaths = 0
                yield running[future]
        except BrokenProcessPool:
            deaths += 1
            if deaths == MOST_DEATHS:
                raise GenerationError(
                    f"processes died {MOST_DEATHS} times in a row; finished work is kept: give "
                    "them more memory or set fewer workers, and resume"
                ) from None
        except PacelineError:
            raise
        except Exception as error:
            raise GenerationError(f"{type(error).__name__}: {error}") from None
        finally:
            _end(pool)


def _end(pool: ProcessPoolExecutor) -> None:
    """End the processes of a pool, even if they are busy."""
    processes = list((pool._processes or {}).values())  # pyright: ignore[reportPrivateUsage]
    pool.shutdown(wait=False, cancel_futures=True)
    for process in processes:
        process.terminate()
    for process in processes:
        process.join(_END_S)
        process.kill()  # of one that is stuck in native code


_work: list[Callable[[Any], object]] = []  # of this worker process


def _begin(
    work: Callable[[Any], object], count: Any, num_threads: int, environment: dict[str, str]
) -> None:
    """Begin a worker. `count`: of the workers that have begun."""
    import torch

    os.environ.clear()  # the process that this one was copied from may have an older one
    os.environ.update(environment)
    # Only the main process handles Ctrl-C. Blocked, not ignored: work may install its own handler.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    _stop_with_main_process()
    keep_freed_memory()
    torch.set_num_threads(num_threads)
    with count.get_lock():
        count.value += 1
    if torch.cuda.is_available():
        torch.cuda.set_device(count.value % torch.cuda.device_count())
    _work.append(work)


def _work_on(item: Any) -> None:
    _work[0](item)


def _stop_with_main_process() -> None:
    """Get SIGTERM if the main process dies; else a worker would notice only after its item."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "called in a worker"

    def watch() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_END_S)
        os._exit(1)  # nobody asks for more work

    threading.Thread(target=watch, daemon=True).start()


@contextmanager
def ignoring_working_directory() -> Iterator[None]:
    """Let processes that this one starts import no modules of the working directory.

    `python -c`, which multiprocessing uses as well, would look there first: for a module of
    Python's own, too.
    """
    before = os.environ.get("PYTHONSAFEPATH", "")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        os.environ["PYTHONSAFEPATH"] = before  # empty is as if it were not set


def connect_to_ray(**settings: Any) -> Any:
    """Import Ray, and connect to the cluster of RAY_ADDRESS, or start one here.

    Workers do not look in the working directory for modules, which Ray would put first on their
    path.

    Args:
        settings: Arguments of `ray.init`.

    Raises:
        ImportError: Ray is not installed.
    """
    import ray
    from ray.job_config import JobConfig

    class OwnPath(JobConfig):
        def _runtime_env_has_working_dir(self) -> bool:
            return True

    if not ray.is_initialized():
        with ignoring_working_directory():
            ray.init(job_config=OwnPath(), log_to_driver=False, **settings)
    return ray


def keep_freed_memory() -> None:
    """Make malloc keep freed blocks instead of returning them to the system (glibc only).

    By default glibc unmaps a freed block of logits, and the next allocation page-faults again: 5%
    of a training step's time on two cores.
    """
    mallopt = getattr(_LIBC, "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_MAX, 0)
        mallopt(_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(_TOP_PAD, _PAD_BYTES)


def spin_briefly() -> None:
    """Make OpenMP's threads sleep sooner where they wait, unless the user chose how they wait.

    Beside a program that computes, threads that spin keep the one they wait for from running: with
    this, decoding is 1.1 to 4 times as fast there. Alone, it makes no difference.

    Without effect after PyTorch is imported.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault(*_SPINS)


def environment_for_engines() -> dict[str, str]:
    """The environment without what `spin_briefly` set: an engine is served as without Paceline."""
    return dict(each for each in os.environ.items() if each != _SPINS)


def end_with_parent() -> None:
    """In a new process: get SIGTERM when the thread that started it ends, even if it is killed.

    Can be a `preexec_fn`; without effect on other systems than Linux.
    """
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def stop_groups(processes: Collection[subprocess.Popen[Any]], grace_s: float = 0.0) -> None:
    """End the process groups that these processes lead.

    They get SIGTERM, and SIGKILL after `grace_s` seconds; without such a time, SIGKILL at once.
    """
    try:
        end = time.monotonic() + grace_s
        for process in processes if grace_s else ():
            _signal_group(process, signal.SIGTERM)
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))
    finally:
        for process in processes:
            _signal_group(process, signal.SIGKILL)


def _signal_group(process: subprocess.Popen[Any], number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def last_lines(log: Path, num_bytes: int) -> list[str]:
    """The lines that are not blank in the last bytes of a log."""
    with log.open("rb") as stream:
        stream.seek(max(0, log.stat().st_size - num_bytes))
        lines = stream.read().decode("utf-8", errors="replace").splitlines()
    return [line.strip() for line in lines if line.strip()]
