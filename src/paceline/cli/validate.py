"""`paceline validate`: is this configuration right? Prints it resolved, runs nothing."""

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import options
from paceline.cli.kinds import Kind, schema_of


def validate(
    kind: Annotated[Kind, typer.Argument(help="The command that the file is for.")],
    config: Annotated[Path, typer.Argument(help="The YAML file.")],
    overrides: options.Overrides = None,
) -> None:
    """Check a configuration file and print it with every default filled in."""
    from paceline.config import to_yaml

    typer.echo(to_yaml(options.build(schema_of(kind), config, overrides)), nl=False)
