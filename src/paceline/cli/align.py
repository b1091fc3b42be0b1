"""`paceline align`: train a draft model to match its target."""

from typing import Annotated

import typer

from paceline.cli import options
from paceline.cli.console import progress_bars, stdout
from paceline.cli.html_report import check_html, write_html_of_run


def align(
    config: options.ConfigFile = None,
    target: options.Target = None,
    draft: options.Draft = None,
    output: Annotated[str | None, typer.Option(help="Run directory to create.")] = None,
    recipe: Annotated[
        str | None, typer.Option(help="supervised_kd, seq_kd, imit_kd, f_distill or gkd.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume a stopped run.")] = False,
    overrides: options.Overrides = None,
    dry_run: options.DryRun = False,
    html: options.Html = None,
) -> None:
    """Train a draft to match its target.

    Needs text and a budget: --config configs/align/quick.yaml, or --set data.train=FILE --set
    max_seconds=360. Writes the aligned draft to OUTPUT/draft, and its figures to OUTPUT.
    """
    from paceline.cli.preflight import check_align
    from paceline.cli.result_tables import alignment_table
    from paceline.records import RunDirectory
    from paceline.train import AlignConfig
    from paceline.train import align as run

    check_html(html)
    wanted = options.build(
        AlignConfig, config, overrides, target=target, draft=draft, output=output, recipe=recipe
    )
    if resume:
        options.check_resumable(wanted.output)
    check_align(wanted, resume=resume, dry_run=dry_run)
    with progress_bars() as progress:
        directory = run(wanted, resume=resume, progress=progress)
    result = RunDirectory(directory).read_result()
    if result is not None and result["after"] is not None:
        stdout.print(alignment_table(result, wanted.evaluation))
    elif not wanted.loads_target:
        stdout.print("no evaluation, which needs the target: measure the draft on its server")
    else:
        stdout.print(
            "no evaluation: set data.held_out or data.held_out_from_train to compare drafts"
        )
    stdout.print(
        f"{directory / 'draft'}: the aligned draft; metrics are in {directory}/result.json"
    )
    write_html_of_run(html, directory)
