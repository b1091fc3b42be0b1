"""Turns what commands wrote into rows of a study."""

from __future__ import annotations

import functools
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.bench import read_rows as read_rows_of_bench
from paceline.models.inspection import count_parameters
from paceline.records import RunDirectory
from paceline.results.row import Row
from paceline.results.row import read_rows as read_rows_of_run
from paceline.studies.execute import StageFolder

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from paceline.studies.plan import PlannedStage


MODELS = ("target", "draft", "truth")
"""Keys of models in the configurations of commands."""


def collect(study: str, output: Path, stages: Sequence[PlannedStage]) -> list[Row]:
    """The rows of all stages that measure something, with the settings of their stages.

    Raises:
        UsageError: a stage's output is of another version or malformed.
    """
    folder = StageFolder(output)
    count = functools.cache(count_parameters)  # the rows of a study are of few models
    rows: list[Row] = []
    for stage in stages:
        if stage.command in _READ:
            for row in _READ[stage.command](stage.folder):
                of_stage = {
                    "stage": stage.name,
                    "command": command_of(stage, folder),
                    "sizes": row.source.sizes or _sizes(stage.config, count),
                }
                of_study = {
                    "study": study,
                    "covers": stage.covers,
                    "setting": stage.labels | row.setting,
                    "source": row.source.model_copy(update=of_stage),
                }
                rows.append(row.model_copy(update=of_study))
    return rows


def _of_bench(folder: Path) -> list[Row]:
    """The finished cells of the bench that the manifest is of, with rounded sums."""
    context = (RunDirectory(folder).read_manifest() or {}).get("context")
    return [_rounded(row) for row in read_rows_of_bench(folder, context) if not row.error]


def _rounded(row: Row) -> Row:
    """Rows of one source are equal in it, so they are without the key of their cell."""
    sums = {
        name: tuple(None if value is None else round(value, 6) for value in values)
        for name, values in row.sums.items()
    }
    marks = {name: mark for name, mark in row.source.fingerprints.items() if name != "key"}
    source = row.source.model_copy(update={"fingerprints": marks})
    return row.model_copy(update={"sums": sums, "source": source})


def _of_run(folder: Path) -> list[Row]:
    return read_rows_of_run(folder / "rows.jsonl")


_READ = {"bench": _of_bench, "trajectory": _of_run, "sweep": _of_run, "bounds": _of_run}


def command_of(stage: PlannedStage, folder: StageFolder) -> str:
    """The command that runs a stage by hand, with the configuration that the study wrote."""
    return shlex.join(["paceline", stage.command, "--config", str(folder.config(stage))])


def model_path(config: Mapping[str, Any], key: str) -> str | None:
    """The model under one of `MODELS`; a sweep has it in the configuration of its runs."""
    path = config.get(key) or (config.get("base") or {}).get(key)
    return path if isinstance(path, str) else None


def _sizes(config: Mapping[str, Any], count: Callable[[Path], int]) -> dict[str, int]:
    """Numbers of parameters of the models that are directories here."""
    paths = {key: model_path(config, key) for key in MODELS}
    counts = {
        key: count(Path(path).expanduser()) for key, path in paths.items() if path is not None
    }
    return {key: number for key, number in counts.items() if number}
