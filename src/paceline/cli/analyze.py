"""`paceline analyze`: predict quality and speed of every rule, without decoding."""

from paceline.cli import options
from paceline.cli.console import echo, progress_bars, stdout


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
    """Predict quality and speed of each rule.

    Nothing is decoded with a rule: one forward pass of each model over text gives rejection rate,
    distance from the target's distribution and predicted speedup of each rule at each threshold.
    """
    from paceline.cli.preflight import check_measured
    from paceline.cli.result_tables import frontier_table
    from paceline.measure.analysis import AnalyzeConfig
    from paceline.measure.analysis import analyze as run

    sampling = options.sampling_keys(temperature, top_p, top_k, draft_temperature)
    wanted = options.build(
        AnalyzeConfig, config, overrides, target=target, draft=draft, prompts=prompts, **sampling
    )
    check_measured(wanted, dry_run=dry_run, as_json=json)
    with progress_bars() as progress:
        found = run(wanted, progress)
    if json:
        echo(found.model_dump_json(indent=2))
    else:
        stdout.print(frontier_table(found))
