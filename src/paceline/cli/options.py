"""Options shared by several commands, and their merge with the configuration file."""

from __future__ import annotations

import functools
import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from paceline.config import apply_override, read_yaml, set_key, validate
from paceline.errors import ConfigError
from paceline.permissions import IMPORTS, PROGRAMS, allow, given
from paceline.records import RunDirectory

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from paceline.config import StrictModel

    ConfigT = TypeVar("ConfigT", bound=StrictModel)

Target = Annotated[
    str | None, typer.Option(help="Target model: directory, .gguf file or hub name.")
]
Draft = Annotated[str | None, typer.Option(help="Draft model: directory, .gguf file or hub name.")]
Prompts = Annotated[
    str | None,
    typer.Option(help="Prompts: .txt (one per line), .jsonl, .parquet, directory, hub data set."),
]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="YAML file of settings; options override it.")
]
Output = Annotated[str | None, typer.Option(help="Run directory.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", help="key.subkey=value; overrides file and options.")
]
Temperature = Annotated[float | None, typer.Option(help="Temperature (default 1); 0: greedy.")]
TopP = Annotated[float | None, typer.Option(help="Nucleus sampling: probability to keep.")]
TopK = Annotated[int | None, typer.Option(help="Keep the k most likely tokens; 0: all.")]
DraftTemperature = Annotated[
    float | None,
    typer.Option(help="Temperature of the draft; 0: greedy drafting, as in most engines."),
]
Costs = Annotated[
    str | None,
    typer.Option(help="Step costs of an engine, from measure --engine --write-costs; no timing."),
]
Rule = Annotated[
    str | None, typer.Option(help="Acceptance rule, such as lossless or '{rule: opt, alpha: 0.2}'.")
]
Penalty = Annotated[float | None, typer.Option(help="Repetition penalty; 1: none.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check models, texts and paths only.")]
Html = Annotated[
    Path | None, typer.Option("--html", help="Also write an HTML report to this file.")
]
AllowImport = Annotated[
    list[str] | None,
    typer.Option(
        help="Python module that a file may import. Those on the command line need no permission."
    ),
]
AllowProgram = Annotated[
    list[str] | None,
    typer.Option(help="Program that files may start, with their options, as an engine."),
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


def with_permissions(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --allow-import and --allow-program to a command that reads a configuration."""
    signature = inspect.signature(command, eval_str=True)
    if "overrides" not in signature.parameters:
        return command

    @functools.wraps(command)
    def run(
        *args: Any,
        allow_import: list[str] | None = None,
        allow_program: list[str] | None = None,
        **kwargs: Any,
    ) -> Any:
        allow(IMPORTS, *(allow_import or ()))
        allow(PROGRAMS, *(allow_program or ()))
        return command(*args, **kwargs)

    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
        for name, kind in (("allow_import", AllowImport), ("allow_program", AllowProgram))
    ]
    parameters = [*signature.parameters.values(), *added]
    run.__signature__ = signature.replace(parameters=parameters)  # pyright: ignore
    return run


def build(
    cls: type[ConfigT],
    config: Path | None,
    overrides: Sequence[str] | None,
    one_of: Collection[str] = (),
    **chosen: Any,
) -> ConfigT:
    """Build a configuration from the file, then the options, then `--set`; the last value wins.

    Option `a__b` sets key b of section a. `a__a` chooses the variant of a and drops the keys of
    another variant. Options in `one_of` are alternatives: any of them removes all from the file.
    """
    values = read_yaml(config) if config is not None else {}
    if config is not None:
        _refuse_another_kind(cls, config, values)
    if any(chosen.get(name) is not None for name in one_of):
        values = {key: value for key, value in values.items() if key not in one_of}
    for name, value in chosen.items():
        if value is None:
            continue
        if value == "":
            option = name.rpartition("__")[2].replace("_", "-")
            raise ConfigError(f"--{option} is empty; give a value, or leave it out")
        section, *keys = name.split("__")
        old = values.get(section)
        if keys == [section] and not (isinstance(old, dict) and old.get(section) == value):
            values[section] = {section: value}
        set_key(values, [section, *keys], given(value), f"option --{[section, *keys][-1]}")
    for override in overrides or ():
        apply_override(values, override)
    alone = not overrides and all(value is None for value in chosen.values())
    return validate(cls, values, config if alone else None)


def sampling_keys(
    temperature: float | None,
    top_p: float | None,
    top_k: int | None,
    draft_temperature: float | None,
) -> dict[str, Any]:
    """Sampling options as arguments of `build`."""
    return {
        "sampling__temperature": temperature,
        "sampling__top_p": top_p,
        "sampling__top_k": top_k,
        "draft_sampling__temperature": draft_temperature,
    }


def check_resumable(output: Path) -> None:
    """Raise ConfigError if there is no run to resume: a mistyped path would train from scratch."""
    if not RunDirectory(output).manifest.exists():
        raise ConfigError(
            f"--resume: {output} holds no run; name the directory of the stopped run, or remove "
            "--resume to start a new one"
        )


def _refuse_another_kind(cls: type[StrictModel], config: Path, values: dict[str, Any]) -> None:
    """Raise one ConfigError for a file of another command, instead of one per unknown key."""
    unknown = [key for key in values if key not in cls.model_fields]
    if not unknown:
        return
    from paceline.cli.config_kinds import Kind, kinds_that_read, schema_of

    others = kinds_that_read(values)
    if others:
        readers = [f"paceline {kind.command}" for kind in Kind if schema_of(kind) is cls]
        wanted = f"; {readers[0]} does not know its key {unknown[0]}" if readers else ""
        commands = " or ".join(kind.command for kind in others)
        raise ConfigError(f"{config} is a file for paceline {commands}{wanted}")
