"""Turns a study into concrete stages: configurations with variables filled in."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.bench import BenchConfig
from paceline.config import StrictModel, read_yaml, set_key, validate
from paceline.data.requests import GenerateDataConfig
from paceline.errors import ConfigError
from paceline.measure.bounds import BoundsConfig
from paceline.measure.trajectory import TrajectoryConfig
from paceline.studies.study_file import SCALES, Command, Label, Scale, Stage, StudyConfig, filled
from paceline.train import AlignConfig, PretrainConfig
from paceline.train.initial_draft import DraftConfig
from paceline.train.sweep import SweepConfig

if TYPE_CHECKING:
    from collections.abc import Iterable

SCHEMAS: dict[Command, type[StrictModel]] = {
    "draft": DraftConfig,
    "pretrain": PretrainConfig,
    "generate-data": GenerateDataConfig,
    "align": AlignConfig,
    "sweep": SweepConfig,
    "trajectory": TrajectoryConfig,
    "bench": BenchConfig,
    "bounds": BoundsConfig,
}
# of the study itself, in its directory
FOLDERS = ("stages", "logs", "replaced", *SCALES)


class PlannedStage(NamedTuple):
    """A stage with its final configuration.

    Attributes:
        name: Of the stage in the study file.
        config: The checked configuration, as plain values.
        folder: The directory that the command writes.
    """

    name: str
    command: Command
    config: dict[str, Any]
    folder: Path
    inputs: tuple[Path, ...]
    outputs: tuple[Path, ...]
    covers: tuple[str, ...]
    labels: dict[str, Label]
    minutes_cpu: float
    minutes_gpu: float
    disk_mb: float


def plan(study: StudyConfig, scale: Scale = "cpu") -> list[PlannedStage]:
    """The stages, in the order of the file.

    Raises:
        ConfigError: a stage's configuration is wrong, or two stages write the same file.
    """
    stages = [_planned(study, name, stage, scale) for name, stage in study.stages.items()]
    _check_places(study.output, stages)
    return stages


def _check_places(output: Path, stages: list[PlannedStage]) -> None:
    """Each stage has a directory of its own in the study's: it is moved away if it is outdated."""
    writers: dict[Path, str] = {}
    for one in stages:
        places = {one.folder, *one.outputs}
        for place in sorted(places & writers.keys()):
            raise ConfigError(
                f"stages {writers[place]} and {one.name} both write {place}; give each its own "
                "output"
            )
        writers |= dict.fromkeys(places, one.name)
        is_shared = any(one.folder in each.folder.parents for each in stages)
        is_own = output in one.folder.parents and one.folder.name not in FOLDERS
        is_own = is_own and ".." not in one.folder.relative_to(output).parts
        if is_shared or not is_own:
            raise ConfigError(
                f"stage {one.name} writes to {one.folder}, which is not a directory of its own in "
                f"the study's; set its output to $output/{one.name}"
            )
        if any(one.folder not in place.parents for place in one.outputs):
            raise ConfigError(
                f"stage {one.name} writes to {one.folder}, so its outputs must be files in it"
            )


def _planned(study: StudyConfig, name: str, stage: Stage, scale: Scale) -> PlannedStage:
    variables = study.variables | {"output": str(study.output)}
    values = read_yaml(stage.config) if stage.config is not None else {}
    for changes in (stage.set, stage.scales.get(scale, {})):
        for key, value in changes.items():
            # a copy: later keys may change what is in a mapping
            set_key(values, key.split("."), deepcopy(value), f"stage {name}: {key}")
    try:
        values = filled(values, variables)
    except (KeyError, ValueError):  # the texts of the stage itself are checked
        raise ConfigError(
            f"stage {name}: {stage.config} has a $ that is no variable of the study; write $$"
        ) from None
    schema = SCHEMAS[stage.command]
    try:
        config = validate(schema, values)
    except ConfigError as error:
        raise ConfigError(f"stage {name}: {error}") from None
    folder: Path | None = getattr(config, "output", None) or getattr(config, "out", None)
    assert folder is not None, "each of these commands has an output"
    return PlannedStage(
        name=name,
        command=stage.command,
        config=values,
        folder=folder,
        inputs=_files(filled(stage.inputs, variables)),
        outputs=tuple(Path(text) for text in filled(stage.outputs, variables)),
        covers=stage.covers,
        labels=filled(stage.labels, variables),
        minutes_cpu=stage.minutes.cpu,
        minutes_gpu=stage.minutes.gpu,
        disk_mb=stage.disk_mb,
    )


def _files(inputs: Iterable[str]) -> tuple[Path, ...]:
    """The inputs; the directory of a model stands for the files in it."""
    found: list[Path] = []
    for path in map(Path, inputs):
        is_model = (path / "config.json").is_file()
        found += sorted(one for one in path.iterdir() if one.is_file()) if is_model else [path]
    return tuple(found)
