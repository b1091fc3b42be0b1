"""Distillation data from a configuration to a run directory; stopped at any moment, it goes on."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from paceline.data.ray_engine import write_with_ray
from paceline.data.request_answering import ShardWriter
from paceline.data.requests import plan_shards
from paceline.data.shards import ShardStore
from paceline.errors import ConfigError, GenerationError
from paceline.models.loading import fingerprint, load_tokenizer
from paceline.processes import in_processes
from paceline.progress import silent
from paceline.records import RunDirectory, append_jsonl, read_jsonl

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from paceline.data.requests import GenerateDataConfig, Shard
    from paceline.progress import Progress

# How the work is dealt out says nothing of what comes out.
_MAY_CHANGE = {"output", "workers", "engine"}


def generate_data(
    config: GenerateDataConfig, *, resume: bool = False, progress: Progress = silent
) -> Path:
    """Let the target answer every request; the records end up as Parquet files in `output/data`.

    A file is written whole or not at all, from its own requests alone: what a killed run leaves is a
    part of what an undisturbed one makes, and resuming makes the rest.

    Args:
        config: What to do.
        resume: Go on with the run in `config.output` if there is one.
        progress: Called as files come in.

    Returns:
        The run directory: `data/` holds the records, `result.json` counts them.

    Raises:
        UsageError: a model, a prompt or a setting cannot be used.
        GenerationError: workers died again and again; what was written stays.
        StorageError: something could not be written; what was written stays.
    """
    run = RunDirectory(config.output)
    store = ShardStore(run.path / "data")
    shards = plan_shards(config, load_tokenizer(config.target))
    digest = _digest(config, shards)
    inputs = {"plan": digest}  # what it hangs on: prompts and models
    begun = bool(store.written())  # one that has written nothing has not begun
    run.check(config, begun=begun, resume=resume, may_change=_MAY_CHANGE, inputs=inputs)
    with run.alone():
        _generate(config, run, store, shards, digest, progress)
    return run.path


def _generate(
    config: GenerateDataConfig,
    run: RunDirectory,
    store: ShardStore,
    shards: Sequence[Shard],
    digest: str,
    progress: Progress,
) -> None:
    store.sweep()
    missing = [shard for shard in shards if not store.holds(shard.name, len(shard.requests))]
    if not missing and run.read_result() is not None:
        return
    if foreign := store.foreign():
        raise ConfigError(
            f"output {run.path} holds records of another version of Paceline, such as {foreign[0]}; "
            "choose another output"
        )
    run.write_manifest(config, plan=digest)
    total = sum(len(shard.requests) for shard in shards)
    done = total - sum(len(shard.requests) for shard in missing)
    if not done:  # nothing of an earlier start is left
        run.metrics.unlink(missing_ok=True)
    began = time.monotonic() - _elapsed_s(run)
    progress("generating", done, total)
    for shard in _write(config, missing, store):
        num_tokens = sum(len(answer.completion_tokens) for answer in store.read([shard.name]))
        elapsed_s = round(time.monotonic() - began, 3)
        append_jsonl(
            run.metrics, {"file": shard.name, "num_tokens": num_tokens, "elapsed_s": elapsed_s}
        )
        done += len(shard.requests)
        progress("generating", done, total)
    run.write_result(_result(run, store, shards))


def _elapsed_s(run: RunDirectory) -> float:
    """Seconds of writing so far, over all starts; those after a start's last whole file are lost."""
    rows = read_jsonl(run.metrics)
    return rows[-1]["elapsed_s"] if rows else 0.0


def _write(
    config: GenerateDataConfig, shards: Sequence[Shard], store: ShardStore
) -> Iterator[Shard]:
    if not shards:
        return
    if config.engine == "ray":
        yield from write_with_ray(config, shards, store.directory)
        return
    work = ShardWriter(config, store.directory)
    if config.workers == 1:
        for shard in shards:
            work(shard)
            yield shard
    else:
        name = attrgetter("name")
        done = in_processes(
            work, shards, workers=config.workers, name=name, failure=GenerationError
        )
        for shard, _ in done:
            yield shard


def _digest(config: GenerateDataConfig, shards: Sequence[Shard]) -> str:
    """Of everything that the records hang on beside the configuration: prompts, and the models' files."""
    digest = hashlib.sha256()
    for path in (config.target, config.draft):
        digest.update((fingerprint(path) if path else "").encode())
    for shard in shards:
        for request in shard.requests:
            digest.update(f"{shard.name} {request.id} {request.seed} {request.tokens}".encode())
    return digest.hexdigest()[:16]


def _result(run: RunDirectory, store: ShardStore, shards: Sequence[Shard]) -> dict[str, Any]:
    """Counts over all files, and the speed over all starts."""
    stop_reasons: Counter[str] = Counter()
    temperatures: Counter[str] = Counter()
    num_tokens = 0
    for shard in shards:
        for answer in store.read([shard.name]):
            num_tokens += len(answer.completion_tokens)
            stop_reasons[answer.stop_reason] += 1
            temperatures[f"{answer.temperature:g}"] += 1
    elapsed_s = _elapsed_s(run)
    timed = sum(row["num_tokens"] for row in read_jsonl(run.metrics))
    return {
        "num_records": stop_reasons.total(),
        "num_files": len(shards),
        "num_tokens": num_tokens,
        "stop_reasons": dict(stop_reasons),
        "temperatures": dict(temperatures),
        "elapsed_s": elapsed_s,
        "tokens_per_s": round(timed / elapsed_s, 1) if elapsed_s else 0.0,
    }
