"""Generates distillation data into a run directory; interrupted runs can be resumed."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from contextlib import closing
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.data.input_checks import checked
from paceline.data.ray_engine import write_with_ray
from paceline.data.request_answering import ShardWriter
from paceline.data.requests import ModelWriter, plan_shards
from paceline.data.shards import ShardStore
from paceline.engines.text_config import MAY_CHANGE, EngineWriter, OpenAIWriter
from paceline.errors import ConfigError, GenerationError
from paceline.models.loading import encoder_decoder_at, fingerprint, load_tokenizer
from paceline.processes import in_processes
from paceline.progress import silent
from paceline.records import RunDirectory, append_jsonl, read_jsonl

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paceline.data.requests import GenerateDataConfig, Shard
    from paceline.progress import Progress

_MAY_CHANGE = {
    *("output", "workers", "engine"),  # settings that do not affect the records
    *MAY_CHANGE,
    *("writer.gpus", "writer.engine.program", "writer.engine.start_seconds"),
}


def generate_data(
    config: GenerateDataConfig, *, resume: bool = False, progress: Progress = silent
) -> Path:
    """Generate the target's answers to all requests as Parquet files in `output/data`.

    Files are written atomically and independently of each other, so a run continued with `resume`
    produces the same records as an uninterrupted one. `progress` is called after each file.

    Returns:
        The run directory: records in `data/`, their counts in `result.json`.

    Raises:
        UsageError: a model, a prompt or a setting is invalid.
        EngineError: no server answers, or answers are damaged; answers so far are kept.
        GenerationError: workers died repeatedly; completed files are kept.
        StorageError: a file could not be written; completed files are kept.
    """
    checked(config)
    run = RunDirectory(config.output)
    store = ShardStore(run.path / "data")
    served = not isinstance(config.writer, ModelWriter)
    encoder = not served and encoder_decoder_at(config.target)
    tokenizer = load_tokenizer(config.target, alone=served)
    shards = plan_shards(config, tokenizer, encoder=encoder)
    digest = _digest(config, shards)
    inputs = {"plan": digest}
    begun = bool(store.written())
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
            f"output {run.path} holds records of another version of Paceline, such as "
            f"{foreign[0]}; choose another output"
        )
    run.write_manifest(config, plan=digest)
    total = sum(len(shard.requests) for shard in shards)
    done = total - sum(len(shard.requests) for shard in missing)
    if not done:
        run.metrics.unlink(missing_ok=True)
    began = time.monotonic() - _elapsed_s(run)
    progress("generating", done, total)
    for shard in _write(config, missing, store):
        num_tokens = sum(len(answer.completion_tokens) for answer in store.read([shard.name]))
        row = {"file": shard.name, "num_tokens": num_tokens}
        append_jsonl(run.metrics, {**row, "elapsed_s": round(time.monotonic() - began, 3)})
        done += len(shard.requests)
        progress("generating", done, total)
    run.write_result(_result(run, store, shards))


def _elapsed_s(run: RunDirectory) -> float:
    """Generation time so far, resumed runs included, up to the last completed file."""
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
        with closing(work):
            for shard in shards:
                work(shard)
                yield shard
    else:
        name, failure = attrgetter("name"), GenerationError
        done = in_processes(work, shards, workers=config.workers, name=name, failure=failure)
        yield from (shard for shard, _ in done)


def _digest(config: GenerateDataConfig, shards: Sequence[Shard]) -> str:
    """Hash of what determines the records besides the configuration: requests and model files."""
    digest = hashlib.sha256()
    for path in _answering_models(config):
        digest.update((fingerprint(path) if path else "").encode())
    for shard in shards:
        for request in shard.requests:
            digest.update(f"{shard.name} {request.id} {request.seed} {request.tokens}".encode())
    return digest.hexdigest()[:16]


def _answering_models(config: GenerateDataConfig) -> tuple[str | None, ...]:
    """Models on this machine that determine the answers."""
    match config.writer:
        case ModelWriter():
            return config.target, config.draft
        case EngineWriter(engine=choice):
            served = choice.target or config.target
            return (served,) if Path(served).exists() else ()
        case OpenAIWriter():
            return ()


def _result(run: RunDirectory, store: ShardStore, shards: Sequence[Shard]) -> dict[str, Any]:
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
