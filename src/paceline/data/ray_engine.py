"""Generates distillation data on a Ray cluster whose machines share one file system."""

from __future__ import annotations

import pickle
import warnings
from typing import TYPE_CHECKING, Any

from paceline.data.request_answering import ShardWriter
from paceline.data.requests import ModelWriter
from paceline.engines.texts import EngineWriter, OpenAIWriter
from paceline.errors import GenerationError, PacelineError, UsageError
from paceline.processes import MOST_DEATHS, connect_to_ray

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from paceline.data.requests import GenerateDataConfig, Shard


def write_with_ray(
    config: GenerateDataConfig, shards: Sequence[Shard], directory: Path
) -> Iterator[Shard]:
    """Write the files with `config.workers` Ray Data actors; yields each completed shard.

    Raises:
        UsageError: Ray is not installed.
        GenerationError: actors died repeatedly on one file, or Ray failed.
        PacelineError: an error of a worker.
    """
    try:
        ray = connect_to_ray()
        from ray.exceptions import RayError
    except ImportError:
        message = "engine ray needs Ray: pip install -e '.[ray]', or use engine processes"
        raise UsageError(message) from None
    by_name = {shard.name: shard for shard in shards}
    items = [{"shard": pickle.dumps(shard)} for shard in shards]
    rows = ray.data.from_items(items, override_num_blocks=len(items))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # max_task_retries, until Ray 2.64
        written = rows.map(
            _Writer,  # pyright: ignore[reportArgumentType] (constructed once per actor)
            fn_constructor_args=(config, directory.resolve()),
            compute=ray.data.ActorPoolStrategy(size=config.workers),
            max_task_retries=MOST_DEATHS - 1,
            num_gpus=_gpus(config.writer) if ray.cluster_resources().get("GPU") else 0,
        )
    try:
        for row in written.iter_rows():
            if row["error"]:
                raise pickle.loads(row["error"])
            yield by_name[row["name"]]
    except RayError as error:
        reason = str(error).strip().splitlines()[-1]
        message = f"Ray failed: {reason}; completed files are kept, resume the run"
        raise GenerationError(message) from None


def _gpus(writer: ModelWriter | OpenAIWriter | EngineWriter) -> float:
    """GPUs of an actor."""
    match writer:
        case ModelWriter():
            return 1
        case EngineWriter(gpus=gpus):
            return gpus
        case OpenAIWriter():
            return 0


class _Writer:
    """An actor; it returns errors in its row, because Ray wraps raised exceptions."""

    def __init__(self, config: GenerateDataConfig, directory: Path) -> None:
        self._write = ShardWriter(config, directory)

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        shard: Shard = pickle.loads(row["shard"])
        error = b""
        try:
            self._write(shard)
        except PacelineError as failure:
            error = pickle.dumps(failure)
        return {"name": shard.name, "error": error}
