"""Turns what commands wrote into rows of a study."""

from __future__ import annotations

import shlex
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.bench import read_rows
from paceline.bench.settings import sampled
from paceline.config import as_written, read_json
from paceline.errors import UsageError
from paceline.measure.bounds import BoundsConfig, BoundsResult
from paceline.measure.trajectory import SCHEMA_VERSION, TrajectoryRow
from paceline.models.inspection import count_parameters
from paceline.records import RunDirectory, read_jsonl
from paceline.results.row import Source
from paceline.studies.execute import StageFolder
from paceline.studies.rows import StudyRow

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from paceline.studies.plan import PlannedStage
    from paceline.studies.study_file import Label

    Sums = dict[str, tuple[float | None, ...]]


SEEDS = "seeds of training"
"""Population of rows whose units are runs, not examples."""
MODELS = ("target", "draft", "truth")
"""Keys of models in the configurations of commands."""


def collect(study: str, output: Path, stages: Sequence[PlannedStage]) -> list[StudyRow]:
    """The rows of all stages that measure something.

    Raises:
        UsageError: a stage's output is of another version or malformed.
    """
    readers = {"trajectory": _trajectory, "bench": _bench, "sweep": _sweep, "bounds": _bounds}
    rows: list[StudyRow] = []
    for stage in stages:
        if stage.command not in readers:
            continue
        with as_written(stage.folder):
            for part in readers[stage.command](stage, StageFolder(output)):
                population, units, setting, sums, more, source = part
                rows.append(
                    StudyRow(
                        study=study,
                        covers=stage.covers,
                        population=population,
                        units=units,
                        setting=stage.labels | setting,
                        sums=sums,
                        source=source,
                        **more,
                    )
                )
    return rows


_Part = tuple[str, tuple[int, ...], "dict[str, Label]", "Sums", "dict[str, Any]", Source]


def _trajectory(stage: PlannedStage, folder: StageFolder) -> Iterator[_Part]:
    """A row per draft, task and sampling; units are prompts."""
    skipped = int(stage.config.get("skip_prompts", 0))
    source = _source(stage, folder)
    rows = [_known(values, stage.folder) for values in read_jsonl(stage.folder / "rows.jsonl")]
    starts = {row.stop.fingerprint: row.stop.run for row in reversed(rows) if row.stop.is_start}
    for row in rows:
        if row.stop.is_start and row.stop.run != starts[row.stop.fingerprint]:
            continue  # runs share their initial draft
        sums: Sums = {
            "tokens": row.texts.tokens,
            "acceptance": row.texts.acceptance,
            "agreement": row.texts.agreement,
        }
        for gamma, blocks in row.texts.blocks.items():
            sums[f"emitted_{gamma}"] = row.texts.emitted[gamma]
            sums[f"blocks_{gamma}"] = blocks
        if row.texts.score:
            sums["score"] = row.texts.score
        units = tuple(range(skipped, skipped + row.num_texts))
        setting: dict[str, Label] = {"task": row.task, **_draft(row, len(starts))}
        setting |= sampled(row.sampling)
        yield f"prompts of {row.task}", units, setting, sums, {}, source


def _known(values: dict[str, Any], folder: Path) -> TrajectoryRow:
    if values.get("schema_version") != SCHEMA_VERSION:
        raise UsageError(
            f"{folder} has rows of an older Paceline; remove it and run the study again"
        )
    return TrajectoryRow.model_validate(values)


def _draft(row: TrajectoryRow, num_starts: int) -> dict[str, Label]:
    """Settings of a draft; a run of a sweep is ROW/COLUMN/seed-N, another is its directory.

    A shared initial draft has no name, so it is compared with all drafts.
    """
    name = row.stop.run.name
    ratio: dict[str, Label] = {"parameter_ratio": round(row.parameter_ratio, 6)}
    if row.stop.is_start:
        start: dict[str, Label] = {"label": "start"} | ratio
        return start if num_starts == 1 else start | {"draft": f"start of {name}"}
    setting: dict[str, Label] = {"label": row.stop.label, "step": row.stop.step} | ratio
    match row.stop.run.parts:
        case [*_, draft, column, seed] if seed.startswith("seed-"):
            number = int(seed.removeprefix("seed-"))
            return setting | {"draft": draft, "trained_on": column, "seed": number}
        case _:
            return setting | {"draft": name}


def _bench(stage: PlannedStage, folder: StageFolder) -> Iterator[_Part]:
    """The rows of the finished cells, with sums rounded."""
    manifest = RunDirectory(stage.folder).read_manifest() or {}
    source = _source(stage, folder)
    for row in read_rows(stage.folder, manifest.get("context")):
        if row.error:
            continue
        sums: Sums = {
            name: tuple(None if value is None else round(value, 6) for value in values)
            for name, values in row.sums.items()
        }
        corpus = {"totals": row.totals, "bounds": row.bounds}
        yield row.population, row.units, row.setting, sums, corpus, source


def _sweep(stage: PlannedStage, folder: StageFolder) -> Iterator[_Part]:
    """A row per cell of the grid; units are seeds. A run that diverged has no values."""
    cells: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for values in read_json(stage.folder / "sweep.json"):
        cells.setdefault((values["row"], values["column"]), []).append(values)
    figures = sorted(
        {key for runs in cells.values() for run in runs for key in run.get("after", ())}
    )
    source = _source(stage, folder)
    for (row, column), runs in cells.items():
        sums: Sums = {}
        for name in figures:
            found = [run.get("after", {}).get(name) for run in runs]
            numbers = [value if isinstance(value, int | float) else None for value in found]
            sums[name] = tuple(None if v is None else round(v, 6) for v in numbers)
        units = tuple(int(run["seed"]) for run in runs)
        yield SEEDS, units, {"row": row, "column": column}, sums, {}, source


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
    yield f"prompts of {config.prompts.path}", units, setting, sums, {}, _source(stage, folder)


def _source(stage: PlannedStage, folder: StageFolder) -> Source:
    run = RunDirectory(stage.folder)
    manifest = run.read_manifest()
    if manifest is None:  # a sweep: its runs have manifests
        found = next(iter(sorted(stage.folder.glob("*/*/seed-*/manifest.json"))), None)
        manifest = read_json(found) if found is not None else {}
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
