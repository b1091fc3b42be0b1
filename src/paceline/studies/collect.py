"""Turns what commands wrote into rows of a study."""

from __future__ import annotations

import shlex
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.bench import read_rows as read_rows_of_bench
from paceline.bench.settings import sampled
from paceline.config import as_written
from paceline.measure.bounds import BoundsConfig, BoundsResult
from paceline.models.inspection import count_parameters
from paceline.records import RunDirectory
from paceline.results.row import Row, Source
from paceline.results.row import read_rows as read_rows_of_run
from paceline.studies.execute import StageFolder

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from paceline.studies.plan import PlannedStage
    from paceline.studies.study_file import Label

    Sums = dict[str, tuple[float | None, ...]]


MODELS = ("target", "draft", "truth")
"""Keys of models in the configurations of commands."""


def collect(study: str, output: Path, stages: Sequence[PlannedStage]) -> list[Row]:
    """The rows of all stages that measure something, with the settings of their stages.

    Raises:
        UsageError: a stage's output is of another version or malformed.
    """
    folder = StageFolder(output)
    rows: list[Row] = []
    for stage in stages:
        if stage.command in _READ:
            for row in _READ[stage.command](stage.folder):
                of_stage = {
                    "stage": stage.name,
                    "command": command_of(stage, folder),
                    "sizes": row.source.sizes or _sizes(stage.config),
                }
                of_study = {
                    "study": study,
                    "covers": stage.covers,
                    "setting": stage.labels | row.setting,
                    "source": row.source.model_copy(update=of_stage),
                }
                rows.append(row.model_copy(update=of_study))
        if stage.command not in _READERS:
            continue
        with as_written(stage.folder):
            for part in _READERS[stage.command](stage, folder):
                population, units, setting, sums, source = part
                rows.append(
                    Row(
                        study=study,
                        covers=stage.covers,
                        population=population,
                        units=units,
                        setting=stage.labels | setting,
                        sums=sums,
                        source=source,
                    )
                )
    return rows


_Part = tuple[str, tuple[int, ...], "dict[str, Label]", "Sums", Source]


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


def _bounds(stage: PlannedStage, folder: StageFolder) -> Iterator[_Part]:
    """One row; units are prompts."""
    config = BoundsConfig.model_validate(stage.config)
    result = RunDirectory(stage.folder).read_result()
    assert result is not None, "a finished stage has a result"
    prompts = BoundsResult.model_validate(result).prompts
    sums: Sums = {
        name: tuple(round(float(getattr(one, name)), 6) for one in prompts)
        for name in ("acceptance", "tight", "proven", "printed", "length", "tvd", "positions")
    }
    for name in prompts[0].regret:
        for key in ("regret", "bound", "violations"):
            values = tuple(round(float(getattr(one, key)[name]), 6) for one in prompts)
            sums[f"{key} {name}"] = values
    units = tuple(config.skip_prompts + one.prompt for one in prompts)
    setting = sampled(config.sampling) | {"max_new_tokens": config.max_new_tokens}
    yield f"prompts of {config.prompts.path}", units, setting, sums, _source(stage, folder)


_READERS = {"bounds": _bounds}
_READ = {
    "bench": _of_bench,
    "trajectory": lambda folder: read_rows_of_run(folder / "rows.jsonl"),
    "sweep": lambda folder: read_rows_of_run(folder / "rows.jsonl"),
}


def _source(stage: PlannedStage, folder: StageFolder) -> Source:
    run = RunDirectory(stage.folder)
    manifest = run.read_manifest()
    assert manifest is not None, "a finished stage has a manifest"
    environment = manifest.get("environment", {})
    git = environment.get("git") or {}
    processor = f"{environment.get('processor', 'unknown processor')}"
    level, cores = environment.get("processor_level"), environment.get("cpu_count")
    gpu = f", {environment['gpu']}" if "gpu" in environment else ""
    marks = manifest | manifest.get("inputs", {})
    fingerprints = {
        key: value
        for key, value in marks.items()
        if isinstance(value, str) and (key == "context" or key.endswith("fingerprint"))
    }
    return Source(
        stage=stage.name,
        command=command_of(stage, folder),
        commit=git.get("commit"),
        modified=bool(git.get("modified")),
        machine=f"{processor} ({level}, {cores} cores){gpu}",
        versions={"python": environment.get("python", "")} | environment.get("versions", {}),
        fingerprints=fingerprints | manifest.get("inputs", {}),
        date=_day(stage),
        sizes=_sizes(stage.config),
    )


def command_of(stage: PlannedStage, folder: StageFolder) -> str:
    """The command that runs a stage by hand, with the configuration that the study wrote."""
    return shlex.join(["paceline", stage.command, "--config", str(folder.config(stage))])


def _day(stage: PlannedStage) -> str | None:
    """The day on which the last output was written, in UTC."""
    ended = [path.stat().st_mtime for path in stage.outputs]
    return datetime.fromtimestamp(max(ended), tz=UTC).date().isoformat() if ended else None


def model_path(config: Mapping[str, Any], key: str) -> str | None:
    """The model under one of `MODELS`; a sweep has it in the configuration of its runs."""
    path = config.get(key) or (config.get("base") or {}).get(key)
    return path if isinstance(path, str) else None


def _sizes(config: Mapping[str, Any]) -> dict[str, int]:
    """Numbers of parameters of the models that are directories here."""
    paths = {key: model_path(config, key) for key in MODELS}
    counts = {
        key: count_parameters(Path(path).expanduser())
        for key, path in paths.items()
        if path is not None
    }
    return {key: count for key, count in counts.items() if count}
