"""`paceline measure`: is this draft worth serving?"""

import typer

from paceline.cli import options
from paceline.cli.console import progress_bars, stdout


def measure(
    target: options.Target = None,
    draft: options.Draft = None,
    prompts: options.Prompts = None,
    config: options.ConfigFile = None,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    overrides: options.Overrides = None,
    dry_run: options.DryRun = False,
    json: options.Json = False,
) -> None:
    """Measure whether a draft is worth serving.

    Gives acceptance, cost and measured speed. The exit code is 1 on NO-GO and 3 without a verdict.
    """
    from paceline.cli.preflight import check_measured
    from paceline.cli.tables import measurement_table, verdict_style
    from paceline.measure import MeasureConfig
    from paceline.measure import measure as run

    sampling = {
        "sampling__temperature": temperature,
        "sampling__top_p": top_p,
        "sampling__top_k": top_k,
    }
    wanted = options.build(
        MeasureConfig, config, overrides, target=target, draft=draft, prompts=prompts, **sampling
    )
    check_measured(wanted, dry_run=dry_run)
    with progress_bars() as progress:
        found = run(wanted, progress)
    if json:
        typer.echo(found.model_dump_json(indent=2))
    else:
        stdout.print(measurement_table(found))
        stdout.print(str(found.verdict), style=verdict_style(found.verdict))
    raise typer.Exit(found.verdict.exit_code)
