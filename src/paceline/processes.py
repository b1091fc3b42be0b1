"""Processes of our own: work dealt out to several, and how they treat memory."""

from __future__ import annotations

import ctypes
import multiprocessing
import signal
import sys
from collections import Counter, deque
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from paceline.errors import PacelineError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from multiprocessing.connection import Connection
    from multiprocessing.context import SpawnProcess

Item = TypeVar("Item")
Result = TypeVar("Result")

MOST_DEATHS = 3  # over one item: then it is the item
# parameters of mallopt, as glibc's malloc.h numbers them
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4
_PAD_BYTES = 64 << 20


class _Place(NamedTuple):
    """Which of the processes this is, and how many threads it may use."""

    number: int
    num_threads: int


class _Worker(NamedTuple):
    number: int
    process: SpawnProcess
    pipe: Connection


def in_processes(
    work: Callable[[Item], Result],
    items: Sequence[Item],
    *,
    workers: int,
    name: Callable[[Item], str],
    failure: type[PacelineError],
) -> Iterator[tuple[Item, Result]]:
    """Each item and what `work` makes of it, as they come; one that dies costs its item's time, no more.

    Args:
        work: Goes to each process once, pickled, and may keep there what it loads.
        items: What there is to do.
        workers: Processes, which share the cores of this one.
        name: An item's, for messages.
        failure: Raised where work fails or dies again and again.

    Raises:
        PacelineError: what `work` says is wrong.
    """
    pool = _Pool(work, items, workers, name, failure)
    try:
        while pool.waiting or pool.working:
            pool.hand_out()
            yield from pool.collect()
    finally:
        pool.end()


class _Pool:
    """What is left to do, who does what, and how often each item has cost a process."""

    def __init__(
        self,
        work: Callable[[Any], Any],
        items: Sequence[Any],
        workers: int,
        name: Callable[[Any], str],
        failure: type[PacelineError],
    ) -> None:
        self.work, self.workers, self.name, self.failure = work, workers, name, failure
        self.waiting = deque(items)
        self.working: dict[Connection, tuple[_Worker, Any]] = {}
        self.idle: list[_Worker] = []
        self.deaths: Counter[str] = Counter()

    def hand_out(self) -> None:
        """Everybody has something to do, as far as there is."""
        while self.waiting and len(self.working) < self.workers:
            worker = self.idle.pop() if self.idle else self._start()
            item = self.waiting.popleft()
            try:
                worker.pipe.send(item)
            except OSError:
                self._bury(worker, item)
            else:
                self.working[worker.pipe] = worker, item

    def collect(self) -> Iterator[tuple[Any, Any]]:
        """Wait until somebody has finished something."""
        for pipe in wait(list(self.working)):
            worker, item = self.working.pop(pipe)  # pyright: ignore[reportArgumentType]
            try:
                result, error = worker.pipe.recv()
            except (EOFError, ConnectionResetError):
                self._bury(worker, item)
                continue
            self.idle.append(worker)
            if isinstance(error, PacelineError):
                raise error
            if error is not None:
                raise self.failure(f"{error} ({self.name(item)})")
            yield item, result

    def end(self) -> None:
        """Whatever they do: a run that trains saves what it has."""
        everyone = self._everyone()
        for worker in everyone:
            worker.process.terminate()
        for worker in everyone:
            worker.process.join()

    def _everyone(self) -> list[_Worker]:
        return [*self.idle, *(worker for worker, _ in self.working.values())]

    def _start(self) -> _Worker:
        import torch  # the command line must answer --help without it

        context = multiprocessing.get_context("spawn")
        mine, theirs = context.Pipe()
        threads = max(1, torch.get_num_threads() // self.workers)
        taken = {worker.number for worker in self._everyone()}
        number = next(n for n in range(self.workers) if n not in taken)  # of one that died, perhaps
        place = _Place(number, threads)
        process = context.Process(target=_run, args=(theirs, self.work, place), daemon=True)
        process.start()
        theirs.close()  # so that its death ends the pipe
        return _Worker(number, process, mine)

    def _bury(self, worker: _Worker, item: Any) -> None:
        worker.process.join()
        name = self.name(item)
        self.deaths[name] += 1
        if self.deaths[name] == MOST_DEATHS:
            raise self.failure(
                f"{MOST_DEATHS} processes died over {name} (the last with exit code "
                f"{worker.process.exitcode}); what was written stays: give them more memory or "
                "set fewer workers, and go on"
            )
        self.waiting.appendleft(item)


def _run(pipe: Connection, work: Callable[[Any], Any], place: _Place) -> None:
    import torch

    # the first process hears it and ends the others; blocked, as training sets handlers of its own
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    keep_freed_memory()
    torch.set_num_threads(place.num_threads)
    if torch.cuda.is_available():
        torch.cuda.set_device(place.number % torch.cuda.device_count())
    while True:
        try:
            item = pipe.recv()
        except EOFError:
            return  # the first process has ended
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


def keep_freed_memory() -> None:
    """Let large blocks be used again instead of going back to the system.

    By default glibc returns a freed block of logits at once, and the next one is paid for page by
    page: a twentieth of a training step's time on two cores. Elsewhere than glibc nothing happens.
    """
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_MAX, 0)
        mallopt(_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(_TOP_PAD, _PAD_BYTES)
