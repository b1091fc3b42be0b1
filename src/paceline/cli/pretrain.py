"""`paceline pretrain`: train a model on text, from nothing or from what it is."""

from typing import Annotated

import typer

from paceline.cli import options
from paceline.cli.console import progress_bars, stdout


def pretrain(
    config: options.ConfigFile = None,
    train: Annotated[
        str | None, typer.Option(help="Text: .txt, .jsonl, .parquet, directory or hub data set.")
    ] = None,
    output: Annotated[str | None, typer.Option(help="Run directory to make.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume a stopped run.")] = False,
    overrides: options.Overrides = None,
    dry_run: options.DryRun = False,
) -> None:
    """Train a new or an existing model on text.

    It learns to predict the next token; the model is OUTPUT/model.
    """
    from paceline.cli.preflight import check_pretrain
    from paceline.train import PretrainConfig
    from paceline.train import pretrain as run

    wanted = options.build(PretrainConfig, config, overrides, data__train=train, output=output)
    if resume:
        options.check_resumable(wanted.output)
    check_pretrain(wanted, resume=resume, dry_run=dry_run)
    with progress_bars() as progress:
        directory = run(wanted, resume=resume, progress=progress)
    stdout.print(f"{directory / 'model'}: the model; figures in {directory}/result.json")
