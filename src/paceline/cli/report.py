"""`paceline report`: the page of a run."""

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.console import echo
from paceline.cli.html_report import check_html


def report(
    folder: Annotated[
        Path, typer.Argument(metavar="RUN", help="Run directory, or a file written with --json.")
    ],
    html: Annotated[
        Path | None, typer.Option("--html", help="Write the report to this file instead.")
    ] = None,
) -> None:
    """Write the result of a run as one HTML file.

    The page has a verdict, charts, tables and definitions.

    Writes report.html into the directory of a bench, tune, trajectory, align or pretrain; next to
    a file that measure, verify or decode wrote with --json. Loads no model.
    """
    from paceline.config import as_written
    from paceline.view import write_report

    check_html(html)
    with as_written(folder):
        written = write_report(folder, html)
    heading = f"{written.page.word}: " if written.page.word else ""
    echo(f"{heading}{written.page.verdict}\n\n{written.path}")
