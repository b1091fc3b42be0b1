"""`paceline bench`: compare decoding settings on a task."""

from typing import Annotated

import typer

from paceline.cli import options
from paceline.cli.console import progress_bars, stderr, stdout
from paceline.cli.html_report import check_html, write_html_of_run
from paceline.errors import NOT_DONE


def bench(
    config: options.ConfigFile = None,
    target: options.Target = None,
    draft: options.Draft = None,
    output: Annotated[str | None, typer.Option(help="Run directory; resumes if it exists.")] = None,
    max_seconds: Annotated[
        float | None, typer.Option(help="Start no cell after N seconds.")
    ] = None,
    overrides: options.Overrides = None,
    dry_run: options.DryRun = False,
    html: options.Html = None,
) -> None:
    """Compare decoding settings on a task.

    Each setting is a cell. Finished cells are kept, so a stopped bench can be resumed. Needs the
    keys task and grid; see configs/bench. `paceline report` shows the results.
    """
    from paceline.bench import BenchConfig
    from paceline.bench import bench as run
    from paceline.cli.preflight import check_bench

    check_html(html)
    given = {"target": target, "draft": draft, "output": output, "max_seconds": max_seconds}
    wanted = options.build(BenchConfig, config, overrides, **given)
    check_bench(wanted, dry_run=dry_run)
    with progress_bars() as progress:
        found = run(wanted, progress)
    failed = sum(row.status == "failed" for row in found.rows)
    stdout.print(
        f"{wanted.output}/results.jsonl: {len(found.rows) - failed} cells done, {failed} failed, "
        f"{found.num_left} left; paceline report {wanted.output} writes its page"
    )
    if failed:
        reason = next(row.error for row in found.rows if row.status == "failed")
        stderr.print(f"paceline: first failure: {reason}")
    write_html_of_run(html, wanted.output)
    if failed:
        raise typer.Exit(NOT_DONE)
