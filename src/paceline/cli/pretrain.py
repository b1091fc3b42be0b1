"""`paceline pretrain`: train a new or existing model on text."""

from typing import Annotated

import typer

from paceline.cli import options
from paceline.cli.console import progress_bars, stdout
from paceline.cli.html_report import check_html, write_html_of_run


def pretrain(
    config: options.ConfigFile = None,
    train: Annotated[
        str | None,
        typer.Option(help="Training text: .txt, .jsonl, .parquet, directory or hub data set."),
    ] = None,
    output: Annotated[str | None, typer.Option(help="Run directory to create.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume a stopped run.")] = False,
    overrides: options.Overrides = None,
    dry_run: options.DryRun = False,
    html: options.Html = None,
) -> None:
    """Train a model on text.

    Trains a new or existing model with next-token prediction and writes it to OUTPUT/model. Needs
    the keys model, data and a budget; see configs/pretrain.
    """
    from paceline.cli.preflight import check_pretrain
    from paceline.train import PretrainConfig
    from paceline.train import pretrain as run

    check_html(html)
    wanted = options.build(PretrainConfig, config, overrides, data__train=train, output=output)
    if resume:
        options.check_resumable(wanted.output)
    check_pretrain(wanted, resume=resume, dry_run=dry_run)
    with progress_bars() as progress:
        directory = run(wanted, resume=resume, progress=progress)
    stdout.print(f"{directory / 'model'}: the model; metrics are in {directory}/result.json")
    write_html_of_run(html, directory)
