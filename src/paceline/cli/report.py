"""`paceline report`: write tables, claims and plots of a bench."""

from pathlib import Path
from typing import Annotated

import typer


def report(
    folder: Annotated[Path, typer.Argument(help="Run directory of a bench.")],
) -> None:
    """Write tables and plots of a bench.

    Writes report.md and the plots to the run directory. Loads no model.
    """
    from paceline.report import write_report

    written = write_report(folder)
    typer.echo(f"{written.summary}\n\n{written.path}")
