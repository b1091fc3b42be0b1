"""The same on a Ray cluster: every machine sees the models and the run directory by the same names."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

from paceline.data.request_answering import ShardWriter
from paceline.errors import GenerationError, PacelineError, UsageError
from paceline.processes import MOST_DEATHS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from paceline.data.requests import GenerateDataConfig, Shard


def write_with_ray(
    config: GenerateDataConfig, shards: Sequence[Shard], directory: Path
) -> Iterator[Shard]:
    """Write the files with `config.workers` actors of Ray Data, yielding each that is there.

    Raises:
        UsageError: Ray is not installed.
        GenerationError: actors died over one file again and again, or Ray cannot go on.
        PacelineError: what a worker says is wrong.
    """
    try:
        import ray
        from ray.exceptions import RayError
    except ImportError:
        raise UsageError(
            "engine ray needs Ray: pip install -e '.[ray]', or use engine processes"
        ) from None
    by_name = {shard.name: shard for shard in shards}
    items = [{"shard": pickle.dumps(shard)} for shard in shards]
    rows = ray.data.from_items(items, override_num_blocks=len(items))
    written = rows.map(
        _Writer,  # pyright: ignore[reportArgumentType] (a class is called once an actor)
        fn_constructor_args=(config, directory.resolve()),
        compute=ray.data.ActorPoolStrategy(size=config.workers),
        max_task_retries=MOST_DEATHS - 1,
        num_gpus=1 if ray.cluster_resources().get("GPU") else 0,
    )
    try:
        for row in written.iter_rows():
            if row["error"]:
                raise pickle.loads(row["error"])
            yield by_name[row["name"]]
    except RayError as error:
        reason = str(error).strip().splitlines()[-1]
        raise GenerationError(
            f"Ray could not go on: {reason}; what was written stays: resume"
        ) from None


class _Writer:
    """An actor. What it finds wrong it says in its row, for Ray wraps errors."""

    def __init__(self, config: GenerateDataConfig, directory: Path) -> None:
        self._write = ShardWriter(config, directory)

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        shard: Shard = pickle.loads(row["shard"])
        error = b""
        try:
            self._write(shard)
        except PacelineError as wrong:
            error = pickle.dumps(wrong)
        return {"name": shard.name, "error": error}
