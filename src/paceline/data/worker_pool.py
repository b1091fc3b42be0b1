"""Processes that write files of distillation data; one that dies costs its file's time, and no more."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections import Counter, deque
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from paceline.data.answers import Answerer
from paceline.data.shards import ShardStore
from paceline.errors import GenerationError, PacelineError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from multiprocessing.connection import Connection
    from multiprocessing.context import SpawnProcess
    from pathlib import Path

    from paceline.data.requests import GenerateDataConfig, Shard

_MOST_DEATHS = 3  # of the workers of one file: then it is the file


class _Worker(NamedTuple):
    process: SpawnProcess
    pipe: Connection


def write_with_processes(
    config: GenerateDataConfig, shards: Sequence[Shard], directory: Path
) -> Iterator[Shard]:
    """Write the files, `config.workers` at a time, yielding each that is there.

    Raises:
        GenerationError: a file's workers died again and again.
        PacelineError: what a worker says is wrong.
    """
    waiting = deque(shards)
    deaths: Counter[str] = Counter()
    working: dict[Connection, tuple[_Worker, Shard]] = {}
    idle: list[_Worker] = []

    def died(worker: _Worker, shard: Shard) -> None:
        worker.process.join()
        deaths[shard.name] += 1
        if deaths[shard.name] == _MOST_DEATHS:
            raise GenerationError(
                f"{_MOST_DEATHS} workers died while writing {shard.name} (the last with exit code "
                f"{worker.process.exitcode}); what was written stays: give them more memory or "
                "set fewer workers, and resume"
            )
        waiting.appendleft(shard)

    try:
        while waiting or working:
            while waiting and len(working) < config.workers:
                worker = idle.pop() if idle else _start(config, directory)
                shard = waiting.popleft()
                try:
                    worker.pipe.send(shard)
                except OSError:
                    died(worker, shard)
                else:
                    working[worker.pipe] = worker, shard
            for pipe in wait(list(working)):
                worker, shard = working.pop(pipe)  # pyright: ignore[reportArgumentType]
                if _finished(worker):
                    idle.append(worker)
                    yield shard
                else:
                    died(worker, shard)
    finally:
        for worker in [*idle, *(worker for worker, _ in working.values())]:
            worker.process.terminate()
            worker.process.join()


def _start(config: GenerateDataConfig, directory: Path) -> _Worker:
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    threads = max(1, (os.cpu_count() or 1) // config.workers)
    process = context.Process(target=_work, args=(theirs, config, directory, threads), daemon=True)
    process.start()
    theirs.close()  # so that its death ends the pipe
    return _Worker(process, mine)


def _finished(worker: _Worker) -> bool:
    """Its answer; False: it died."""
    try:
        answer = worker.pipe.recv()
    except (EOFError, ConnectionResetError):
        worker.process.join()
        return False
    if answer is not None:
        raise answer
    return True


def _work(pipe: Any, config: GenerateDataConfig, directory: Path, threads: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process hears it and ends the others
    torch.set_num_threads(threads)
    store = ShardStore(directory)
    answerer: Answerer | None = None
    while True:
        try:
            shard: Shard = pipe.recv()
        except EOFError:
            return  # the run is over
        try:
            answerer = answerer or Answerer(config)
            store.write(shard.name, answerer.answer(shard))
        except PacelineError as error:
            pipe.send(error)
            return
        except Exception as error:
            pipe.send(
                GenerationError(f"{type(error).__name__} while writing {shard.name}: {error}")
            )
            return
        pipe.send(None)
