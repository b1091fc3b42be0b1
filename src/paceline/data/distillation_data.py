"""Generates distillation data into a run directory; interrupted runs can be resumed."""

from __future__ import annotations

import itertools
from collections import Counter, deque
from typing import TYPE_CHECKING, Any

from paceline.data.answering import ShardStore, ShardWriter
from paceline.data.input_checks import checked, size_in_words
from paceline.data.requests import ModelWriter, Shard, plan_shards
from paceline.environment import how_to_install
from paceline.errors import GenerationError, PacelineError, UsageError
from paceline.fingerprints import short_hash
from paceline.models.hf.architectures import is_encoder_decoder
from paceline.models.loading import config_at, fingerprint, load_tokenizer
from paceline.processes import MOST_DEATHS, connect_to_ray, in_processes
from paceline.progress import silent
from paceline.records import RunDirectory

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from paceline.data.requests import GenerateDataConfig
    from paceline.progress import Progress


_TOKEN_BYTES = 12  # of an id, and of about four characters of text


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
        EngineError: no server answers, or answers are damaged; completed files are kept.
        GenerationError: workers died repeatedly; completed files are kept.
        StorageError: a file could not be written; completed files are kept.
    """
    checked(config, resume=resume)
    run = RunDirectory(config.output)
    store = ShardStore(run.path / "data")
    config.check_run(run, resume=resume)
    with run.alone():
        shards = _shards(config)  # in it, as templates can write the date
        digest = _digest(config, shards)
        config.check_run(run, resume=resume, inputs={"plan": digest})
        _generate(config, run, store, shards, digest, progress)
    return run.path


def planned(config: GenerateDataConfig) -> str:
    """Texts, tokens and bytes of a run, for its dry run.

    Bytes are those of token ids and text before compression, of recorded scores and hidden states.
    """
    requests = [request for shard in _shards(config) for request in shard.requests]
    num_read = sum(len(request.tokens) for request in requests)
    num_new = len(requests) * config.max_new_tokens
    num_bytes = (num_read + num_new) * _TOKEN_BYTES + num_new * _recorded_bytes(config)
    return (
        f"run: {len(requests):,} answers to prompts of {num_read:,} tokens, at most {num_new:,} "
        f"new tokens and about {size_in_words(num_bytes)}"
    )


def _recorded_bytes(config: GenerateDataConfig) -> int:
    """Bytes that are recorded with a new token."""
    writer = config.writer
    scores = 8 * writer.top_logprobs  # an id and a log probability
    if writer.hidden_states:
        return scores + 2 * config_at(config.target).get_text_config().hidden_size
    return scores


def _shards(config: GenerateDataConfig) -> list[Shard]:
    served = not isinstance(config.writer, ModelWriter)
    encoder = not served and is_encoder_decoder(config_at(config.target))
    tokenizer = load_tokenizer(config.target, alone=served)
    return plan_shards(config, tokenizer, encoder=encoder)


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
    run.write_manifest(config, plan=digest)
    total = sum(len(shard.requests) for shard in shards)
    done = total - sum(len(shard.requests) for shard in missing)
    progress("generating", done, total)
    for shard in _write(config, missing, store):
        done += len(shard.requests)
        progress("generating", done, total)
    run.write_result(_result(store, shards))


def _write(
    config: GenerateDataConfig, shards: Sequence[Shard], store: ShardStore
) -> Iterator[Shard]:
    if not shards:
        return
    if config.pool == "ray":
        yield from _write_with_ray(config, shards, store.directory)
        return
    work = ShardWriter(config, store.directory)
    if config.workers == 1:
        for shard in shards:
            work(shard)
            yield shard
    else:
        yield from in_processes(work, shards, config.workers)


def _digest(config: GenerateDataConfig, shards: Sequence[Shard]) -> str:
    """Hash of what determines the records besides the configuration: requests and model files."""
    loaded = (config.target, config.draft) if isinstance(config.writer, ModelWriter) else ()
    models = (fingerprint(path) if path else "" for path in loaded)
    requests = (
        f"{shard.name} {request.id} {request.seed} {request.tokens}"
        for shard in shards
        for request in shard.requests
    )
    return short_hash(itertools.chain(models, requests))


def _result(store: ShardStore, shards: Sequence[Shard]) -> dict[str, Any]:
    stop_reasons: Counter[str] = Counter()
    temperatures: Counter[str] = Counter()
    num_tokens = 0
    for shard in shards:
        for row in store.columns(shard.name, "completion_tokens", "stop_reason", "temperature"):
            num_tokens += len(row["completion_tokens"])
            stop_reasons[row["stop_reason"]] += 1
            temperatures[f"{row['temperature']:g}"] += 1
    return {
        "num_records": stop_reasons.total(),
        "num_files": len(shards),
        "num_tokens": num_tokens,
        "stop_reasons": dict(stop_reasons),
        "temperatures": dict(temperatures),
    }


def _write_with_ray(
    config: GenerateDataConfig, shards: Sequence[Shard], directory: Path
) -> Iterator[Shard]:
    """Write the files with actors of Ray, on machines that share one file system.

    Raises:
        UsageError: Ray is not installed.
        GenerationError: actors died repeatedly on one file, or Ray failed.
        PacelineError: an error of a worker.
    """
    try:
        ray = connect_to_ray()
        from ray.exceptions import RayError
    except ImportError:
        message = f"pool ray needs Ray: {how_to_install('ray')}, or use pool processes"
        raise UsageError(message) from None
    loads = isinstance(config.writer, ModelWriter)
    gpus = int(loads and ray.cluster_resources().get("GPU", 0) > 0)
    start = ray.remote(
        num_cpus=1, num_gpus=gpus, max_restarts=-1, max_task_retries=MOST_DEATHS - 1
    )(ShardWriter)
    actors = [start.remote(config, directory.resolve()) for _ in range(config.workers)]
    running: dict[Any, tuple[Any, Shard | None]]
    running = {actor.__ray_ready__.remote(): (actor, None) for actor in actors}
    waiting, num_left = deque(shards), len(shards)
    try:
        while num_left:
            (done,), _ = ray.wait(list(running))
            (actor, shard), error = running.pop(done), ray.get(done)
            if isinstance(error, PacelineError):
                raise error
            if shard is not None:
                num_left -= 1
                yield shard
            if waiting:
                shard = waiting.popleft()
                running[actor.__ray_call__.remote(_error_of, shard)] = actor, shard
    except RayError as error:
        reason = str(error).strip().splitlines()[-1]
        message = f"Ray failed: {reason}; completed files are kept, resume the run"
        raise GenerationError(message) from None


def _error_of(write: ShardWriter, shard: Shard) -> PacelineError | None:
    """Write a file in an actor; the error is returned, because Ray wraps raised exceptions."""
    try:
        write(shard)
    except PacelineError as error:
        return error
    return None
