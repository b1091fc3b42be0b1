"""`paceline report`: tables, claims and plots of a run, as Markdown or HTML."""

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.console import echo
from paceline.errors import UsageError


def report(
    folder: Annotated[
        Path, typer.Argument(metavar="RUN", help="Run directory, or a file written with --json.")
    ],
    html: Annotated[
        bool, typer.Option("--html", help="Write one HTML file instead of Markdown and plots.")
    ] = False,
) -> None:
    """Write tables and plots of a run.

    Writes report.md and the plots to the run directory of a bench. With --html writes report.html
    for every kind of run: study, bench, tune, trajectory, sweep, align, pretrain; next to a file
    that measure, verify or decode wrote with --json. Loads no model.
    """
    from paceline.config import as_written

    if html:
        from paceline.report.html.installation import require

        require()
        from paceline.report.html.read import read_page
        from paceline.report.html.render import write

        with as_written(folder):
            found = read_page(folder)
            write(found.page, found.path)
        heading = f"{found.page.word}: " if found.page.word else ""
        echo(f"{heading}{found.page.verdict}\n\n{found.path}")
        return
    from paceline.report.html.read import recognise
    from paceline.report.run_kind import is_bench

    with as_written(folder):
        if not is_bench(folder):
            recognise(folder)
            raise UsageError(f"{folder} is not a bench, so its report is HTML only: add --html")
        from paceline.report import write_report

        written = write_report(folder)
    echo(f"{written.summary}\n\n{written.path}")
