"""`paceline validate`: is this configuration right? Prints it resolved, runs nothing."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import options


class Kind(StrEnum):
    """Commands that read a configuration."""

    align = "align"
    measure = "measure"
    verify = "verify"


def validate(
    kind: Annotated[Kind, typer.Argument(help="The command that the file is for.")],
    config: Annotated[Path, typer.Argument(help="The YAML file.")],
    overrides: options.Overrides = None,
) -> None:
    """Check a configuration file and print it with every default filled in."""
    from paceline.config import to_yaml
    from paceline.measure import MeasureConfig, VerifyConfig
    from paceline.train import AlignConfig

    schemas = {Kind.align: AlignConfig, Kind.measure: MeasureConfig, Kind.verify: VerifyConfig}
    typer.echo(to_yaml(options.build(schemas[kind], config, overrides)), nl=False)
