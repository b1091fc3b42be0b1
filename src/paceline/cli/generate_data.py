"""`paceline generate-data`: generate distillation data with the target."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli import options
from paceline.cli.console import echo, progress_bars, stdout
from paceline.errors import UsageError

if TYPE_CHECKING:
    from paceline.data.requests import GenerateDataConfig


def generate_data(
    config: options.ConfigFile = None,
    target: options.Target = None,
    prompts: options.Prompts = None,
    output: Annotated[str | None, typer.Option(help="Run directory to create.")] = None,
    workers: Annotated[int | None, typer.Option(help="Number of generating processes.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume a stopped run.")] = False,
    plan: Annotated[
        float | None,
        typer.Option(help="Measure N seconds, print tokens, hours and size of the run, and exit."),
    ] = None,
    price: Annotated[
        float | None, typer.Option(help="Price of the hardware per hour, for --plan.")
    ] = None,
    overrides: options.Overrides = None,
    dry_run: options.DryRun = False,
    as_json: options.Json = False,
) -> None:
    """Generate training data with the target.

    Samples answers to prompts at several temperatures and writes them to OUTPUT/data/*.parquet.
    """
    from paceline.cli.preflight import check_generate_data
    from paceline.data.distillation_data import generate_data as run
    from paceline.data.requests import GenerateDataConfig

    if price is not None and plan is None:
        raise UsageError("--price is for --plan; give --plan 60, too, or leave it out")
    if plan is not None and not 0 < plan < math.inf:
        raise UsageError(f"--plan {plan:g} is no duration; give seconds above 0, such as 60")
    if price is not None and not 0 <= price < math.inf:
        raise UsageError(f"--price {price:g} is no price; give a number of 0 or more")
    if plan is not None and config is None:
        output = output or "not-written"  # a plan keeps nothing
    given = {"target": target, "prompts": prompts, "output": output, "workers": workers}
    wanted = options.build(GenerateDataConfig, config, overrides, **given)
    if resume:
        options.check_resumable(wanted.output)
    check_generate_data(wanted, dry_run=dry_run, as_json=as_json)
    if plan is not None:
        _print_plan(wanted, plan, price, as_json=as_json)
        return
    with progress_bars() as progress:
        directory = run(wanted, resume=resume, progress=progress)
    text = (directory / "result.json").read_text("utf-8")
    if as_json:
        echo(text.strip())
        return
    result = json.loads(text)
    counts = f"{result['num_records']:,} records, {result['num_tokens']:,} tokens"
    stdout.print(f"{directory / 'data'}: {counts}; metrics are in {directory}/result.json")


def _print_plan(
    config: GenerateDataConfig, seconds: float, price: float | None, *, as_json: bool
) -> None:
    from paceline.cli.plan_table import plan_table
    from paceline.data.distillation_data import plan_run

    with progress_bars() as progress:
        found = plan_run(config, seconds, price, progress)
    if as_json:
        echo(found.model_dump_json(indent=2))
    else:
        stdout.print(plan_table(found))
