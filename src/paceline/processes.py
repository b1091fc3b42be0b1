"""Worker processes, how processes end, and how malloc reuses memory."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from paceline.errors import PacelineError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence
    from multiprocessing.connection import Connection
    from multiprocessing.context import ForkServerContext, SpawnContext
    from multiprocessing.process import BaseProcess
    from pathlib import Path

Item = TypeVar("Item")
Result = TypeVar("Result")

_END_S = 60  # seconds in which a worker may save its state
MOST_DEATHS = 3  # processes lost on one item before it counts as the cause
# mallopt parameters, as numbered in glibc's malloc.h
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4
_PAD_BYTES = 64 << 20
_PR_SET_PDEATHSIG = 1  # of prctl
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


class _Worker(NamedTuple):
    number: int
    process: BaseProcess
    pipe: Connection


def in_processes(
    work: Callable[[Item], Result],
    items: Sequence[Item],
    *,
    workers: int,
    name: Callable[[Item], str],
    failure: type[PacelineError],
) -> Iterator[tuple[Item, Result]]:
    """Yield each item with `work(item)`, in order of completion.

    An item whose process dies (out of memory, for example) is retried in a new process.

    Args:
        work: Pickled and sent to each process once; it may cache what it loads.
        items: The work items.
        workers: Number of processes; they share this process's cores.
        name: Describes an item in error messages.
        failure: Raised if `work` fails, or if an item kills MOST_DEATHS processes.

    Raises:
        PacelineError: raised by `work`.
    """
    pool = _Pool(work, deque(items), workers, name, failure)
    try:
        while pool.waiting or pool.working:
            pool.assign()
            yield from pool.collect()
    finally:
        pool.end()


@dataclass
class _Pool:
    work: Callable[[Any], Any]
    waiting: deque[Any]
    workers: int
    name: Callable[[Any], str]
    failure: type[PacelineError]
    working: dict[Connection, tuple[_Worker, Any]] = field(default_factory=dict)
    idle: list[_Worker] = field(default_factory=list)
    deaths: Counter[str] = field(default_factory=Counter)

    def assign(self) -> None:
        """Send pending items to idle or new workers."""
        while self.waiting and len(self.working) < self.workers:
            worker = self.idle.pop() if self.idle else self._start()
            item = self.waiting.popleft()
            try:
                worker.pipe.send(item)
            except OSError:
                self._handle_death(worker, item)
            else:
                self.working[worker.pipe] = worker, item

    def collect(self) -> Iterator[tuple[Any, Any]]:
        """Wait for results and yield them."""
        for pipe in wait(list(self.working)):
            worker, item = self.working.pop(pipe)  # pyright: ignore[reportArgumentType]
            try:
                result, error = worker.pipe.recv()
            except (EOFError, ConnectionResetError):
                self._handle_death(worker, item)
                continue
            self.idle.append(worker)
            if isinstance(error, PacelineError):
                raise error
            if error is not None:
                raise self.failure(f"{error} ({self.name(item)})")
            yield item, result

    def end(self) -> None:
        # even if busy: work may save its state on SIGTERM
        everyone = self._everyone()
        for worker in everyone:
            worker.process.terminate()
        for worker in everyone:
            worker.process.join(_END_S)
            worker.process.kill()  # of one that is stuck in native code

    def _everyone(self) -> list[_Worker]:
        return [*self.idle, *(worker for worker, _ in self.working.values())]

    def _start(self) -> _Worker:
        import torch  # the command line must answer --help without it

        context = _context(type(self.work).__module__)
        mine, theirs = context.Pipe()
        threads = max(1, torch.get_num_threads() // self.workers)
        taken = {worker.number for worker in self._everyone()}
        number = next(n for n in range(self.workers) if n not in taken)  # reuses a dead worker's
        arguments = (theirs, self.work, number, threads, dict(os.environ))
        process = context.Process(target=_run, args=arguments, daemon=True)
        process.start()
        theirs.close()  # so that recv() raises EOFError if the process dies
        return _Worker(number, process, mine)

    def _handle_death(self, worker: _Worker, item: Any) -> None:
        worker.process.join()
        name = self.name(item)
        self.deaths[name] += 1
        if self.deaths[name] == MOST_DEATHS:
            raise self.failure(
                f"{MOST_DEATHS} processes died over {name} (the last with exit code "
                f"{worker.process.exitcode}); finished work is kept: give them more memory or "
                "set fewer workers, and resume"
            )
        self.waiting.appendleft(item)


def _context(module: str) -> ForkServerContext | SpawnContext:
    """How processes start: copied from one that has imported torch, so that later ones start fast.

    Linux only; elsewhere each process imports everything. `module`: also imported.
    """
    ignore_working_directory()
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    # transformers alone imports next to nothing until it is used
    context.set_forkserver_preload(["torch", "transformers.modeling_utils", module])
    return context


def _run(
    pipe: Connection,
    work: Callable[[Any], Any],
    number: int,
    num_threads: int,
    environment: dict[str, str],
) -> None:
    import torch

    os.environ.clear()  # the process that this one was copied from may have an older one
    os.environ.update(environment)
    # Only the main process handles Ctrl-C. Blocked, not ignored: work may install its own handler.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    _stop_with_main_process()
    keep_freed_memory()
    torch.set_num_threads(num_threads)
    if torch.cuda.is_available():
        torch.cuda.set_device(number % torch.cuda.device_count())
    while True:
        try:
            item = pipe.recv()
        except EOFError:
            return  # the main process has exited
        try:
            answer = work(item), None
        except PacelineError as error:
            answer = None, error
        except Exception as error:
            answer = None, f"{type(error).__name__}: {error}"
        try:
            pipe.send(answer)
        except OSError:
            return
        if answer[1] is not None:
            return


def _stop_with_main_process() -> None:
    """Get SIGTERM if the main process dies; else a worker would notice only after its item."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "called in a worker"

    def watch() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def ignore_working_directory() -> None:
    """Let processes that this one starts import no modules of the working directory.

    `python -c`, which multiprocessing uses as well, would look there first: for a module of
    Python's own, too.
    """
    os.environ["PYTHONSAFEPATH"] = "1"


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
        ignore_working_directory()
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
