"""`paceline trajectory`: how a draft got better, checkpoint by checkpoint."""

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import options
from paceline.cli.console import progress_bars, stdout


def trajectory(
    config: options.ConfigFile = None,
    target: options.Target = None,
    runs: Annotated[
        list[Path] | None, typer.Option("--run", help="Run of pretrain or align; may be repeated.")
    ] = None,
    output: Annotated[str | None, typer.Option(help="Directory of rows and plots.")] = None,
    plot: Annotated[bool, typer.Option(help="Draw tau over steps and seconds, too.")] = False,
    overrides: options.Overrides = None,
    dry_run: options.DryRun = False,
) -> None:
    """Measure every checkpoint of training runs.

    Gives tokens per target call on several tasks, against the draft at the start.
    """
    from paceline.cli.preflight import check_trajectory
    from paceline.cli.result_tables import trajectory_tables
    from paceline.measure.trajectory import TrajectoryConfig
    from paceline.measure.trajectory import trajectory as run

    named = [str(path) for path in runs] if runs else None
    given = {"target": target, "output": output, "runs": named}
    wanted = options.build(TrajectoryConfig, config, overrides, **given)
    if plot:
        from paceline.report.plots import load_matplotlib

        load_matplotlib()  # if it is missing, say so now
    check_trajectory(wanted, dry_run=dry_run)
    with progress_bars() as progress:
        rows = run(wanted, progress)
    stdout.print(trajectory_tables(rows))
    if plot:
        from paceline.report.trajectory_plots import draw_trajectories

        draw_trajectories(rows, wanted.output / "trajectory.png")
    stdout.print(f"rows in {wanted.output}/rows.jsonl")
