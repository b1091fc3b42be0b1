"""`paceline analyze`: the predicted frontier of every rule."""

import typer

from paceline.cli import options
from paceline.cli.console import progress_bars, stdout


def analyze(
    target: options.Target = None,
    draft: options.Draft = None,
    prompts: options.Prompts = None,
    config: options.ConfigFile = None,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    draft_temperature: options.DraftTemperature = None,
    overrides: options.Overrides = None,
    dry_run: options.DryRun = False,
    json: options.Json = False,
) -> None:
    """Predict what each decoding rule costs and saves.

    Nothing is decoded: one pass of each model over text gives, for each rule at each threshold, what it
    rejects, how far it leaves the target and what it saves.
    """
    from paceline.cli.preflight import check_measured
    from paceline.cli.result_tables import frontier_table
    from paceline.measure.predicted_frontier import AnalyzeConfig
    from paceline.measure.predicted_frontier import analyze as run

    sampling = {
        "sampling__temperature": temperature,
        "sampling__top_p": top_p,
        "sampling__top_k": top_k,
        "draft_sampling__temperature": draft_temperature,
    }
    wanted = options.build(
        AnalyzeConfig, config, overrides, target=target, draft=draft, prompts=prompts, **sampling
    )
    check_measured(wanted, dry_run=dry_run)
    with progress_bars() as progress:
        found = run(wanted, progress)
    if json:
        typer.echo(found.model_dump_json(indent=2))
    else:
        stdout.print(frontier_table(found))
