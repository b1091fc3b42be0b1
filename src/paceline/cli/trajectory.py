"""`paceline trajectory`: measure every checkpoint of training runs."""

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import options
from paceline.cli.console import progress_bars, stdout
from paceline.cli.html_report import check_html, write_html


def trajectory(
    config: options.ConfigFile = None,
    target: options.Target = None,
    runs: Annotated[
        list[Path] | None,
        typer.Option("--run", help="Run directory of pretrain or align; repeatable."),
    ] = None,
    output: Annotated[str | None, typer.Option(help="Directory for rows and plots.")] = None,
    plot: Annotated[bool, typer.Option(help="Also plot tau over steps and over seconds.")] = False,
    overrides: options.Overrides = None,
    dry_run: options.DryRun = False,
    html: options.Html = None,
) -> None:
    """Measure every checkpoint of training runs.

    Reports tokens per target call of the initial draft and of each checkpoint on several tasks.
    Needs the key tasks; see configs/direct/trajectory.yaml.
    """
    from paceline.cli.preflight import check_trajectory
    from paceline.cli.result_tables import trajectory_tables
    from paceline.measure.trajectory import TrajectoryConfig
    from paceline.measure.trajectory import trajectory as run

    check_html(html)
    named = [str(path) for path in runs] if runs else None
    given = {"target": target, "output": output, "runs": named}
    wanted = options.build(TrajectoryConfig, config, overrides, **given)
    if plot:
        from paceline.view import require

        require()  # fails before the measurement
    check_trajectory(wanted, dry_run=dry_run)
    with progress_bars() as progress:
        rows = run(wanted, progress)
    stdout.print(trajectory_tables(rows))
    if plot:
        from paceline.view.training_pages import draw_trajectories

        draw_trajectories(rows, wanted.output / "trajectory.png")
    stdout.print(f"rows are in {wanted.output}/rows.jsonl")
    if html is not None:
        from paceline.records import RunDirectory
        from paceline.view.training_pages import trajectory_page

        manifest = RunDirectory(wanted.output).read_manifest()
        write_html(html, lambda: trajectory_page(rows, manifest))
