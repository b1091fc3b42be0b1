"""`paceline measure`: acceptance and speed of a draft, here or in an engine."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli import options
from paceline.cli.console import echo, progress_bars, say, stdout
from paceline.cli.html_report import check_html, write_html_of_verdict

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
        str | None, typer.Option(help="URL of a running server; default: start one.")
    ] = None,
    write_costs: Annotated[
        str | None,
        typer.Option(help="With --engine: time the engine's steps and write them to this file."),
    ] = None,
    costs: options.Costs = None,
    overrides: options.Overrides = None,
    dry_run: options.DryRun = False,
    json: options.Json = False,
    html: options.Html = None,
) -> None:
    """Measure acceptance and speed of a draft.

    Reports acceptance, cost and measured speedup. Exit code 1: NO-GO; 3: undecided or no verdict.
    With --engine, compares the engine's counters with the prediction. Exit code 1: they differ; 3:
    undecided.
    With --costs, predicts the speedup in the engine that the costs were measured in.
    """
    from paceline.errors import UsageError
    from paceline.measure import MeasureConfig
    from paceline.measure.served_figures import ServedConfig

    check_html(html)
    given: dict[str, Any] = {
        "target": target,
        "draft": draft,
        "prompts": prompts,
        **options.sampling_keys(temperature, top_p, top_k, draft_temperature),
    }
    if engine is None:
        for option, value in (("--url", url), ("--write-costs", write_costs)):
            if value is not None:
                raise UsageError(
                    f"{option} needs --engine with vllm, llamacpp, sglang or transformers"
                )
        wanted = options.build(MeasureConfig, config, overrides, **given, costs=costs)
        _measure(wanted, dry_run, json, html)
    if costs is not None:
        raise UsageError("--costs cannot be used with --engine; there, --write-costs writes them")
    given |= {"engine__engine": engine, "engine__url": url, "write_costs__file": write_costs}
    _measure_served(options.build(ServedConfig, config, overrides, **given), dry_run, json, html)


def _measure(wanted: "MeasureConfig", dry_run: bool, json: bool, html: Path | None) -> None:
    from paceline.cli.preflight import check_measured
    from paceline.cli.result_tables import measurement_table, verdict_style
    from paceline.measure import measure as run

    check_measured(wanted, dry_run=dry_run, as_json=json)
    with progress_bars() as progress:
        found = run(wanted, progress)
    if json:
        echo(found.model_dump_json(indent=2))
    else:
        stdout.print(measurement_table(found))
        stdout.print(str(found.verdict), style=verdict_style(found.verdict))
    if html is not None:
        from paceline.view.measure_pages import measure_page

        write_html_of_verdict(html, lambda: measure_page(found))
    raise typer.Exit(found.verdict.exit_code)


def _measure_served(wanted: "ServedConfig", dry_run: bool, json: bool, html: Path | None) -> None:
    from paceline.cli.preflight import check_served
    from paceline.cli.result_tables import verdict_style
    from paceline.cli.served_tables import served_table
    from paceline.measure.served import measure_served, save_costs

    check_served(wanted, dry_run=dry_run, as_json=json)
    with progress_bars() as progress:
        found = measure_served(wanted, progress)
    for note in found.notes:
        say(f"note: {note}")
    if json:
        echo(found.model_dump_json(indent=2))
    else:
        stdout.print(served_table(found))
        stdout.print(str(found.agreement), style=verdict_style(found.agreement))
    save_costs(found)  # last, so that a full disk does not lose the figures
    if found.config.write_costs is not None:
        say(f"costs written to {found.config.write_costs.file}")
    if html is not None:
        from paceline.view.measure_pages import served_page

        write_html_of_verdict(html, lambda: served_page(found))
    raise typer.Exit(found.agreement.exit_code)
