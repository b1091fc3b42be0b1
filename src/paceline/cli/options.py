"""Options that several commands share, and how they become one configuration."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from paceline.config import apply_override, read_yaml, set_key, validate
from paceline.errors import ConfigError
from paceline.records import RunDirectory

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from paceline.config import StrictModel

    ConfigT = TypeVar("ConfigT", bound=StrictModel)

Target = Annotated[
    str | None, typer.Option(help="Target model: directory, .gguf file or hub name.")
]
Draft = Annotated[str | None, typer.Option(help="Draft model: directory or hub name.")]
Prompts = Annotated[
    str | None,
    typer.Option(help="Prompts: .txt (one a line), .jsonl, .parquet, directory, hub data set."),
]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="YAML file; options win over it.")
]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", help="key.subkey=value, over file and options.")
]
Temperature = Annotated[float | None, typer.Option(help="Sampling temperature; 0 is greedy.")]
TopP = Annotated[float | None, typer.Option(help="Nucleus sampling: smallest set of this mass.")]
TopK = Annotated[int | None, typer.Option(help="Keep the k likeliest tokens; 0 keeps all.")]
DraftTemperature = Annotated[
    float | None,
    typer.Option(help="The draft's own temperature: 0 drafts greedily, as most engines do."),
]
Costs = Annotated[
    str | None,
    typer.Option(help="Use an engine's costs (measure --engine --write-costs) instead of timing."),
]
Rule = Annotated[
    str | None,
    typer.Option(help="Verification rule, such as lossless or '{rule: opt, alpha: 0.2}'."),
]
Penalty = Annotated[float | None, typer.Option(help="Repetition penalty; 1 is none.")]
DryRun = Annotated[
    bool,
    typer.Option("--dry-run", help="Check models, texts and places, then stop: nothing is run."),
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


def build(
    cls: type[ConfigT],
    config: Path | None,
    overrides: Sequence[str] | None,
    one_of: Collection[str] = (),
    **given: Any,
) -> ConfigT:
    """A configuration from the file, then options that were given, then `--set`.

    An option named `a__b` sets the key b of a; `a__a` chooses what a is, and takes its place where the
    file has another. Of the options in `one_of`, one that is given takes the place of the file's.
    """
    values = read_yaml(config) if config is not None else {}
    if config is not None:
        _refuse_another_kind(cls, config, values)
    if any(given.get(name) is not None for name in one_of):
        values = {key: value for key, value in values.items() if key not in one_of}
    for name, value in given.items():
        if value is None:
            continue
        section, *keys = name.split("__")
        old = values.get(section)
        if keys == [section] and not (isinstance(old, dict) and old.get(section) == value):
            values[section] = {section: value}
        set_key(values, [section, *keys], value, f"option --{[section, *keys][-1]}")
    for override in overrides or ():
        apply_override(values, override)
    return validate(cls, values)


def check_resumable(output: Path) -> None:
    """Is there a run that `--resume` can mean?

    Raises:
        ConfigError: there is none; a mistyped name would train from scratch.
    """
    run = RunDirectory(output)
    if not run.manifest.exists():
        raise ConfigError(
            f"--resume: {output} holds no run; name the directory of the stopped run, or leave "
            "--resume out to start a new one"
        )


def _refuse_another_kind(cls: type[StrictModel], config: Path, values: dict[str, Any]) -> None:
    """Is this a file of another command? Then one line says so, not one for every key.

    Raises:
        ConfigError: it is.
    """
    unknown = [key for key in values if key not in cls.model_fields]
    if not unknown:
        return
    from paceline.cli.config_kinds import Kind, kinds_that_read, schema_of

    others = kinds_that_read(values)
    if others:
        readers = [f"paceline {kind.command}" for kind in Kind if schema_of(kind) is cls]
        wanted = f"; {readers[0]} does not know its key {unknown[0]}" if readers else ""
        raise ConfigError(
            f"{config} is a file for paceline {' or '.join(kind.command for kind in others)}{wanted}"
        )
