"""`paceline generate-data`: let the target write the text that a draft is aligned on."""

import json
from typing import Annotated

import typer

from paceline.cli import options
from paceline.cli.console import progress_bars, stdout


def generate_data(
    config: options.ConfigFile = None,
    target: options.Target = None,
    prompts: options.Prompts = None,
    output: Annotated[str | None, typer.Option(help="Run directory to make.")] = None,
    workers: Annotated[int | None, typer.Option(help="Processes that write.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume a stopped run.")] = False,
    overrides: options.Overrides = None,
    dry_run: options.DryRun = False,
) -> None:
    """Let the target answer prompts, as training text.

    The records, at several temperatures, are OUTPUT/data/*.parquet.
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
    stdout.print(
        f"{directory / 'data'}: {result['num_records']:,} records, {result['num_tokens']:,} tokens; "
        f"figures in {directory}/result.json"
    )
