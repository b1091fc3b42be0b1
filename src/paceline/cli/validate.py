"""`paceline validate`: is this configuration right? Prints it resolved, runs nothing."""

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import options
from paceline.cli.config_kinds import Kind, schema_of
from paceline.errors import UsageError


def validate(
    kind: Annotated[Kind, typer.Argument(help="The command that the file is for.")],
    config: Annotated[Path | None, typer.Argument(help="The YAML file.")] = None,
    overrides: options.Overrides = None,
    defaults: Annotated[
        bool,
        typer.Option("--defaults", help="List every key with its default and its meaning instead."),
    ] = False,
) -> None:
    """Check a configuration file, or list its keys.

    Prints the file with every default filled in. --defaults lists every key with default and meaning.
    """
    from paceline.cli.defaults import describe_defaults
    from paceline.config import to_yaml

    if defaults:
        typer.echo(describe_defaults(schema_of(kind)), nl=False)
        return
    if config is None and not overrides:
        raise UsageError(
            f"got no file to check; give one, or list the keys: validate {kind} --defaults"
        )
    typer.echo(to_yaml(options.build(schema_of(kind), config, overrides)), nl=False)
