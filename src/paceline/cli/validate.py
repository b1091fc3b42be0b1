"""`paceline validate`: check a configuration file without running it."""

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import options
from paceline.cli.config_kinds import Kind, schema_of
from paceline.cli.console import echo
from paceline.errors import UsageError


def validate(
    kind: Annotated[Kind, typer.Argument(help="Command that the file configures.")],
    config: Annotated[Path | None, typer.Argument(help="YAML file to check.")] = None,
    overrides: options.Overrides = None,
    defaults: Annotated[
        bool, typer.Option("--defaults", help="List all keys with default and description instead.")
    ] = False,
) -> None:
    """Check a configuration file, or list its keys.

    Prints the configuration with all defaults filled in, or one error.
    """
    from paceline.cli.defaults import describe_defaults
    from paceline.config import to_yaml

    if defaults:
        echo(describe_defaults(schema_of(kind)), nl=False)
        return
    if config is None and not overrides:
        raise UsageError(
            f"no file to check; name one, or list all keys with validate {kind} --defaults"
        )
    echo(to_yaml(options.build(schema_of(kind), config, overrides)), nl=False)
