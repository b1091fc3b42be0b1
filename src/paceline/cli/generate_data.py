"""`paceline generate-data`: generate distillation data with the target."""

import json
from typing import Annotated

import typer

from paceline.cli import options
from paceline.cli.console import progress_bars, stdout


def generate_data(
    config: options.ConfigFile = None,
    target: options.Target = None,
    prompts: options.Prompts = None,
    output: Annotated[str | None, typer.Option(help="Run directory to create.")] = None,
    workers: Annotated[int | None, typer.Option(help="Number of generating processes.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume a stopped run.")] = False,
    overrides: options.Overrides = None,
    dry_run: options.DryRun = False,
) -> None:
    """Generate training data with the target.

    Samples answers to prompts at several temperatures and writes them to OUTPUT/data/*.parquet.
    """
    from paceline.cli.preflight import check_generate_data
    from paceline.data.distillation_data import generate_data as run
    from paceline.data.requests import GenerateDataConfig

    given = {"target": target, "prompts": prompts, "output": output, "workers": workers}
    wanted = options.build(GenerateDataConfig, config, overrides, **given)
    if resume:
        options.check_resumable(wanted.output)
    check_generate_data(wanted, dry_run=dry_run)
    with progress_bars() as progress:
        directory = run(wanted, resume=resume, progress=progress)
    result = json.loads((directory / "result.json").read_text("utf-8"))
    counts = f"{result['num_records']:,} records, {result['num_tokens']:,} tokens"
    stdout.print(f"{directory / 'data'}: {counts}; metrics are in {directory}/result.json")
