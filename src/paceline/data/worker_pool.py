"""Processes that write files of distillation data; one that dies costs its file's time, and no more."""

from __future__ import annotations

import multiprocessing
import os
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
    workers: list[_Worker] = []
    working: dict[Connection, Shard] = {}
    try:
        while waiting or working:
            while waiting and len(workers) < min(config.workers, len(waiting) + len(working)):
                workers.append(_start(config, directory))
            for worker in workers:
                if waiting and worker.pipe not in working:
                    working[worker.pipe] = waiting.popleft()
                    worker.pipe.send(working[worker.pipe])
            for pipe in wait([worker.pipe for worker in workers]):
                (worker,) = (worker for worker in workers if worker.pipe is pipe)
                shard = working.pop(worker.pipe)
                if _finished(worker):
                    yield shard
                    continue
                workers.remove(worker)
                deaths[shard.name] += 1
                if deaths[shard.name] == _MOST_DEATHS:
                    raise GenerationError(
                        f"{_MOST_DEATHS} workers died while writing {shard.name} (the last with "
                        f"exit code {worker.process.exitcode}); what was written stays: give them "
                        "more memory or a smaller batch_size, and resume"
                    )
                waiting.appendleft(shard)
    finally:
        for worker in workers:
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
    if isinstance(answer, PacelineError):
        raise answer
    return True


def _work(pipe: Any, config: GenerateDataConfig, directory: Path, threads: int) -> None:
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
        pipe.send(None)
