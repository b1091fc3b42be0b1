"""`paceline measure`: is this draft worth serving, here or in an engine?"""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli import options
from paceline.cli.console import progress_bars, say, stdout

if TYPE_CHECKING:
    from paceline.measure import MeasureConfig
    from paceline.measure.served_figures import ServedConfig


def measure(
    target: options.Target = None,
    draft: options.Draft = None,
    prompts: options.Prompts = None,
    config: options.ConfigFile = None,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    draft_temperature: options.DraftTemperature = None,
    engine: Annotated[
        str | None,
        typer.Option(help="Measure in an engine: vllm, llamacpp, sglang or transformers."),
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="An engine's server that runs; default: start one.")
    ] = None,
    write_costs: Annotated[
        str | None,
        typer.Option(help="With --engine: time the engine's steps, and write their costs here."),
    ] = None,
    costs: options.Costs = None,
    overrides: options.Overrides = None,
    dry_run: options.DryRun = False,
    json: options.Json = False,
) -> None:
    """Measure whether a draft is worth serving.

    Gives acceptance, cost and measured speed. The exit code is 1 on NO-GO and 3 without a verdict.
    With --engine: what the engine's own counters say, beside what was predicted; 1 if they differ.
    With --costs: what to expect in the engine whose costs FILE holds.
    """
    from paceline.errors import UsageError
    from paceline.measure import MeasureConfig
    from paceline.measure.served_figures import ServedConfig

    given: dict[str, Any] = {
        "target": target,
        "draft": draft,
        "prompts": prompts,
        "sampling__temperature": temperature,
        "sampling__top_p": top_p,
        "sampling__top_k": top_k,
        "draft_sampling__temperature": draft_temperature,
    }
    if engine is None:
        for option, value in (("--url", url), ("--write-costs", write_costs)):
            if value is not None:
                raise UsageError(
                    f"{option} needs --engine to name the engine: vllm, llamacpp, sglang or transformers"
                )
        _measure(
            options.build(MeasureConfig, config, overrides, **given, costs=costs), dry_run, json
        )
    if costs is not None:
        raise UsageError("--costs is read without --engine; with it, --write-costs writes them")
    given |= {"engine__engine": engine, "engine__url": url, "write_costs__file": write_costs}
    _measure_served(options.build(ServedConfig, config, overrides, **given), dry_run, json)


def _measure(wanted: "MeasureConfig", dry_run: bool, json: bool) -> None:
    from paceline.cli.preflight import check_measured
    from paceline.cli.result_tables import measurement_table, verdict_style
    from paceline.measure import measure as run

    check_measured(wanted, dry_run=dry_run)
    with progress_bars() as progress:
        found = run(wanted, progress)
    if json:
        typer.echo(found.model_dump_json(indent=2))
    else:
        stdout.print(measurement_table(found))
        stdout.print(str(found.verdict), style=verdict_style(found.verdict))
    raise typer.Exit(found.verdict.exit_code)


def _measure_served(wanted: "ServedConfig", dry_run: bool, json: bool) -> None:
    from paceline.cli.preflight import check_served
    from paceline.cli.served_tables import agreement_style, served_table
    from paceline.measure.served import measure_served, save_costs

    check_served(wanted, dry_run=dry_run)
    with progress_bars() as progress:
        found = measure_served(wanted, progress)
    for note in found.notes:
        say(f"note: {note}")
    if json:
        typer.echo(found.model_dump_json(indent=2))
    else:
        stdout.print(served_table(found))
        stdout.print(str(found.agreement), style=agreement_style(found.agreement))
    save_costs(found)  # behind the figures, which a full disk does not take
    if found.config.write_costs is not None:
        say(f"costs written to {found.config.write_costs.file}")
    raise typer.Exit(found.agreement.exit_code)
