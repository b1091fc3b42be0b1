"""Study files: stages of Paceline commands with declared inputs and outputs.

A study is a YAML file in configs/studies, here or in Paceline. Texts of a stage may contain
variables of the study, such as `$target`, and `$output`, the study's directory.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from string import Template
from typing import Annotated, Any, Literal, cast

from pydantic import Field, model_validator

from paceline.config import HomePath, StrictModel, load_config
from paceline.errors import UsageError
from paceline.places import SHIPPED

FOLDER = Path("configs/studies")
SCALES = ("cpu", "gpu", "smoke")
Scale = Literal["cpu", "gpu", "smoke"]
Command = Literal[
    "draft", "pretrain", "generate-data", "align", "sweep", "trajectory", "bench", "bounds"
]
Label = str | int | float


class Minutes(StrictModel):
    """Expected minutes of a stage: on two CPU cores, and on a GPU of the H200 class.

    With `workers`, other stages run beside it, and the study takes about the sum / workers.
    """

    cpu: float = Field(gt=0)
    gpu: float = Field(gt=0)


class Stage(StrictModel):
    """One command of a study.

    Attributes:
        command: The Paceline command.
        config: Its configuration file; None: `set` is the whole configuration.
        set: Keys that override the file.
        inputs: Files and models that the stage reads; it runs again if their content changes.
        outputs: Files that the stage writes.
        covers: Items of the papers that its rows belong to, such as `DistillSpec Figure 4`.
        labels: Settings of all its rows that the command does not know, such as the pair's name.
        minutes: Expected duration.
        disk_mb: Expected size of the outputs.
        scales: Overrides of `set` by scale.
    """

    command: Command
    config: HomePath | None = None
    set: dict[str, Any] = Field(default_factory=dict)
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = Field(min_length=1)
    covers: tuple[str, ...] = ()
    labels: dict[str, Label] = Field(default_factory=dict)
    minutes: Minutes
    disk_mb: float = Field(ge=0)
    scales: dict[Scale, dict[str, Any]] = Field(default_factory=dict)


class StudyConfig(StrictModel):
    """A study.

    Attributes:
        title: What the study measures, in one line.
        about: The models and the texts, for readers who do not know their names.
        variables: Values of `$name` in the stages.
        prepare: How to make the inputs that no stage writes; ends the error about a missing one.
        output: Directory of the study.
        stages: The stages by name.
        workers: Number of stages that run at the same time and share the threads.
        runner: `local` runs stages here, `ray` on the nodes of a Ray cluster with shared files.
    """

    title: str = Field(min_length=1)
    about: str = ""
    variables: dict[str, str] = Field(default_factory=dict)
    prepare: str = ""
    output: HomePath
    stages: dict[Annotated[str, Field(pattern=r"^[a-z0-9_-]+$")], Stage] = Field(min_length=1)
    workers: int = Field(default=1, ge=1)
    runner: Literal["local", "ray"] = "local"

    @model_validator(mode="after")
    def _variables_are_known(self) -> StudyConfig:
        if "output" in self.variables:
            raise ValueError("variables has output, which is reserved; rename it")
        for name, stage in self.stages.items():
            for text in texts_of(stage.model_dump(mode="json")):
                self._check_variables(name, text)
        return self

    def _check_variables(self, stage: str, text: str) -> None:
        template = Template(text)
        known = {*self.variables, "output"}
        if not template.is_valid():
            raise ValueError(f"stage {stage}: {text!r} has a $ without a name; write $$ for a $")
        for name in template.get_identifiers():
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                hint = f"; did you mean ${near[0]}?" if near else f"; add {name} to variables"
                raise ValueError(f"stage {stage}: unknown variable ${name}{hint}")


def texts_of(value: Any) -> list[str]:
    """All strings in nested lists and mappings, except keys."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [text for part in cast("dict[str, Any]", value).values() for text in texts_of(part)]
    if isinstance(value, list | tuple):
        return [text for part in cast("list[Any]", value) for text in texts_of(part)]
    return []


def filled(value: Any, variables: dict[str, str]) -> Any:
    """The value with the variables replaced in all strings."""
    if isinstance(value, str):
        return Template(value).substitute(variables)
    if isinstance(value, dict):
        return {key: filled(part, variables) for key, part in cast("dict[str, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [filled(part, variables) for part in cast("list[Any]", value)]
    return value


def find_studies(folder: Path = FOLDER) -> dict[str, Path]:
    """The study files of the folder by name, with those that come with Paceline."""
    names = {path.name for place in (SHIPPED / folder, folder) for path in place.glob("*.yaml")}
    return {Path(name).stem: folder / name for name in sorted(names)}


def study_path(name: str, folder: Path = FOLDER) -> Path:
    """The file of a study, given by name or path.

    Raises:
        UsageError: there is none.
    """
    path = Path(name)
    if path.suffix in {".yaml", ".yml"}:
        return path
    known = find_studies(folder)
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name, known, 1)
    hint = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(known)}"
    raise UsageError(f"no study {name} in {folder}; {hint}")


def read_study(path: Path) -> StudyConfig:
    """Read and check a study file; raises ConfigError if it is wrong."""
    return load_config(StudyConfig, path)
