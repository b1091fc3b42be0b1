"""Turns what commands wrote into rows of a study."""

from __future__ import annotations

import shlex
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from paceline.bench.runner import read_rows
from paceline.bench.schema import ResultRow, digest, family, parameters_of
from paceline.config import as_written
from paceline.decode.strategies import Autoregressive, Oracle, Speculative
from paceline.models.inspection import count_parameters
from paceline.records import RunDirectory
from paceline.results.row import Source
from paceline.results.row import read_rows as read_rows_of_run
from paceline.studies.execute import StageFolder
from paceline.studies.rows import StudyRow

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from paceline.core.sampling import SamplingParams
    from paceline.decode.strategies import DecodingConfig
    from paceline.studies.plan import PlannedStage
    from paceline.studies.study_file import Label

    Sums = dict[str, tuple[float | None, ...]]


MODELS = ("target", "draft", "truth")
"""Keys of models in the configurations of commands."""


def collect(study: str, output: Path, stages: Sequence[PlannedStage]) -> list[StudyRow]:
    """The rows of all stages that measure something, with the settings of their stages.

    Raises:
        UsageError: a stage's output is of another version or malformed.
    """
    folder = StageFolder(output)
    rows: list[StudyRow] = []
    for stage in stages:
        if stage.command in ("trajectory", "sweep", "bounds"):
            for row in read_rows_of_run(stage.folder / "rows.jsonl", StudyRow):
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
        if stage.command != "bench":
            continue
        with as_written(stage.folder):
            for part in _bench(stage, folder):
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
