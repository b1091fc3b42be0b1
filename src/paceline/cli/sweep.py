"""`paceline sweep`: compare alignment runs over objectives, texts and seeds."""

from typing import Annotated

import typer

from paceline.cli import options
from paceline.cli.console import progress_bars, stdout
from paceline.cli.html_report import check_html, write_html_of_run


def sweep(
    config: options.ConfigFile = None,
    output: Annotated[str | None, typer.Option(help="Parent directory of all runs.")] = None,
    overrides: options.Overrides = None,
    dry_run: options.DryRun = False,
    html: options.Html = None,
) -> None:
    """Compare many alignment runs in a table.

    Runs `align` once for each row, column and seed of the file. Intervals are over seeds. Needs a
    file; see configs/sweep.
    """
    from paceline.cli.preflight import check_sweep
    from paceline.cli.result_tables import sweep_tables
    from paceline.train.sweep import SweepConfig
    from paceline.train.sweep import sweep as run

    check_html(html)
    wanted = options.build(SweepConfig, config, overrides, output=output)
    check_sweep(wanted, dry_run=dry_run)
    with progress_bars() as progress:
        found = run(wanted, progress)
    stdout.print(sweep_tables(found))
    stdout.print(f"metrics are in {wanted.output}/sweep.json")
    write_html_of_run(html, wanted.output)
