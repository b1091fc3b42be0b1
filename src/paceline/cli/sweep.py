"""`paceline sweep`: which objective, on which text? A table of runs."""

from typing import Annotated

import typer

from paceline.cli import options
from paceline.cli.console import progress_bars, stdout


def sweep(
    config: options.ConfigFile = None,
    output: Annotated[str | None, typer.Option(help="Directory of all runs.")] = None,
    overrides: options.Overrides = None,
) -> None:
    """Align once for each row, column and seed of the file; print the table with its intervals."""
    from paceline.cli.tables import sweep_tables
    from paceline.train.sweep import SweepConfig
    from paceline.train.sweep import sweep as run

    wanted = options.build(SweepConfig, config, overrides, output=output)
    with progress_bars() as progress:
        found = run(wanted, progress)
    stdout.print(sweep_tables(found))
    stdout.print(f"figures in {wanted.output}/sweep.json")
