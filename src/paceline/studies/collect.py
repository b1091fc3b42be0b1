"""Turns what commands wrote into rows of a study."""

from __future__ import annotations

import shlex
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from paceline.bench.runner import read_rows
from paceline.bench.schema import ResultRow, digest, family, parameters_of
from paceline.config import as_written, read_json
from paceline.decode.strategies import Autoregressive, Oracle, Speculative
from paceline.errors import UsageError
from paceline.measure.trajectory import SCHEMA_VERSION, TrajectoryRow
from paceline.models.inspection import count_parameters
from paceline.records import RunDirectory, read_jsonl
from paceline.results.row import Source
from paceline.results.row import read_rows as rows_of
from paceline.studies.execute import StageFolder
from paceline.studies.rows import StudyRow

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from paceline.core.sampling import SamplingParams
    from paceline.decode.strategies import DecodingConfig
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
    readers = {"trajectory": _trajectory, "bench": _bench, "sweep": _sweep, "bounds": _written}
    rows: list[StudyRow] = []
    for stage in stages:
        if stage.command not in readers:
            continue
        with as_written(stage.folder):
            for part in readers[stage.command](stage, StageFolder(output)):
                population, units, setting, sums, decoding, source = part
                rows.append(
                    StudyRow(
                        study=study,
                        covers=stage.covers,
                        population=population,
                        units=units,
                        setting=stage.labels | setting,
                        sums=sums,
                        decoding=decoding,
                        source=source,
                    )
                )
    return rows


_Part = tuple[str, tuple[int, ...], "dict[str, Label]", "Sums", "DecodingConfig | None", Source]


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
        setting |= _sampled(row.sampling)
        yield f"prompts of {row.task}", units, setting, sums, None, source


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
    """A row per cell; units are examples."""
    manifest = RunDirectory(stage.folder).read_manifest() or {}
    config = cast("dict[str, Any]", manifest.get("config", {}))
    task = config.get("task", {}).get("task", "task")
    # tasks of one kind may read different texts
    population = f"examples of {task} {digest(config.get('task'), config.get('seed'))}"
    skipped = int(stage.config.get("skip_examples", 0))
    source = _source(stage, folder)
    for row in read_rows(stage.folder, manifest.get("context")):
        if row.status != "done":
            continue
        units = tuple(range(skipped, skipped + len(row.examples)))
        setting: dict[str, Label] = {"task": str(task)} | _decoding(row)
        yield population, units, setting, _example_sums(row), row.decoding, source


def _decoding(row: ResultRow) -> dict[str, Label]:
    strategy = row.decoding.strategy
    setting = {"family": family(row.decoding)} | _sampled(row.decoding.sampling)
    if isinstance(strategy, Autoregressive):
        return setting
    if not isinstance(strategy, Speculative | Oracle):
        return setting | _parameters(strategy)
    setting |= _parameters(strategy.rule)
    if isinstance(strategy, Speculative):
        policy = _parameters(strategy.policy).items()
        setting |= {f"policy_{key}": value for key, value in policy}
        setting["gamma"] = strategy.num_speculative_tokens
    return setting


def _parameters(variant: Any) -> dict[str, Label]:
    return {
        key: value
        for key, value in parameters_of(variant).items()
        if isinstance(value, int | float | str) and not isinstance(value, bool)
    }


def _example_sums(row: ResultRow) -> Sums:
    examples = row.examples
    sums: Sums = {
        "score": tuple(None if one.score is None else round(one.score, 6) for one in examples),
        "tokens": tuple(len(one.tokens) for one in examples),
        "prefill_tokens": tuple(one.num_prefill_tokens for one in examples),
        "calls": tuple(one.num_target_calls for one in examples),
        "examined": tuple(one.num_examined for one in examples),
        "rejected": tuple(one.num_rejected for one in examples),
        "seconds": tuple(
            None if one.baseline is None else round(one.seconds, 6) for one in examples
        ),
        "target_seconds": tuple(
            None if one.baseline is None else round(one.baseline.seconds, 6) for one in examples
        ),
        "target_tokens": tuple(
            None if one.baseline is None else one.baseline.num_tokens for one in examples
        ),
    }
    references = [one.reference for one in examples]
    if any(references):
        sums["reference_seconds"] = tuple(
            None if one is None else round(one.seconds, 6) for one in references
        )
        sums["reference_tokens"] = tuple(
            None if one is None else one.num_tokens for one in references
        )
    return sums


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
        yield SEEDS, units, {"row": row, "column": column}, sums, None, source


def _written(stage: PlannedStage, folder: StageFolder) -> Iterator[_Part]:
    """The rows that the command wrote."""
    source = _source(stage, folder)
    for row in rows_of(stage.folder):
        yield row.population, row.units, row.setting, row.sums, None, source


def _sampled(sampling: SamplingParams) -> dict[str, Label]:
    setting: dict[str, Label] = {"temperature": sampling.temperature}
    if sampling.top_p < 1:
        setting["top_p"] = sampling.top_p
    if sampling.top_k:
        setting["top_k"] = sampling.top_k
    return setting


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
