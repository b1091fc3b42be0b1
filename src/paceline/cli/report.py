"""`paceline report`: tables, claims and plots of a bench, from its rows."""

from pathlib import Path
from typing import Annotated

import typer


def report(
    folder: Annotated[Path, typer.Argument(help="Run directory of a bench.")],
) -> None:
    """Draw tables and plots of a finished bench.

    Writes report.md and plots into its directory; needs no model.
    """
    from paceline.report import write_report

    written = write_report(folder)
    typer.echo(f"{written.summary}\n\n{written.path}")
