"""Commands that measure drafts and models."""

import json
from typing import TYPE_CHECKING

from paceline.cli import options
from paceline.cli.command import Call, Group, Verb, styled
from paceline.cli.console import progress_bars, say, stdout
from paceline.cli.html_report import check_html, write_html
from paceline.errors import UsageError

if TYPE_CHECKING:
    from paceline.bench.score import Score, ScoreConfig
    from paceline.cli.command import Shown
    from paceline.measure import (
        DraftComparison,
        LosslessnessReport,
        MeasureConfig,
        Measurement,
        VerifyConfig,
    )
    from paceline.measure.analysis import AnalyzeConfig, PredictedFrontier
    from paceline.measure.perplexity import Perplexity, PerplexityConfig
    from paceline.measure.served import ServedConfig, ServedMeasurement

MEASURE = Group("Measure drafts and models")


@MEASURE.command("paceline.measure:MeasureConfig", engine="paceline.measure.served:ServedConfig")
def measure(
    call: Call,
    dry_run: options.DryRun = False,
    as_json: options.Json = False,
    html: options.Html = None,
    rows: options.Rows = None,
) -> None:
    """Measure acceptance and speed of a draft.

    Reports acceptance, cost and measured speedup. Exit code 1: NO-GO; 3: undecided or no verdict.
    With several --draft, compares them on the same texts. Exit code 0: one is GO; 1: all are NO-GO.
    With --engine, measures requests in the engine with and without the draft, and compares its
    counters with the prediction. Exit codes as above; of a running server, which has no requests
    without the draft, 1: the counters differ; 3: undecided.
    With --costs, predicts the speedup in the engine that the costs were measured in.
    """
    with_engine = "engine.engine" in call.chosen
    if with_engine and "costs" in call.chosen:
        raise UsageError("--costs cannot be used with --engine; there, --write-costs writes them")
    for key, option in (("engine.url", "--url"), ("write_costs.file", "--write-costs")):
        if key in call.chosen and not with_engine:
            from paceline.engines.kinds import names_of

            raise UsageError(f"{option} needs --engine with {names_of(lambda _: True)}")
    if with_engine and isinstance(call.chosen.get("draft"), list):
        raise UsageError("--engine serves one draft; give one --draft, and run it for each")
    if isinstance(drafts := call.chosen.get("draft"), list):
        call.chosen |= {"draft": drafts[0], "other_drafts": drafts[1:]}
    run = _SERVED if with_engine else _MEASURED
    if not with_engine:
        from paceline.measure import MeasureConfig

        run = _COMPARED if call.build(MeasureConfig).other_drafts else _MEASURED
    run(call, dry_run=dry_run, as_json=as_json, html=html, rows=rows)


def _measured(result: "Measurement", _config: "MeasureConfig") -> "Shown":
    from paceline.cli.result_tables import measurement_table

    yield measurement_table(result)
    yield styled(result.verdict)
    return result.verdict.exit_code


def _compared(result: "DraftComparison", _config: "MeasureConfig") -> "Shown":
    from paceline.cli.tables import printed
    from paceline.view.tables import drafts_table

    yield printed(drafts_table(result))
    for found in result.measurements:
        yield styled(found.verdict, f"{found.config.draft}: ")
    return result.exit_code


def _served(result: "ServedMeasurement", _config: "ServedConfig") -> "Shown":
    from paceline.cli.result_tables import served_lines
    from paceline.measure.served import save_costs

    yield from served_lines(result)
    yield styled(result.agreement, "counters: " if result.verdict is not None else "")
    if result.verdict is not None:
        yield styled(result.verdict)
    save_costs(result)  # last, so that a full disk does not lose the figures
    if result.config.write_costs is not None:
        say(f"costs written to {result.config.write_costs.file}")
    return result.exit_code


_MEASURED = Verb(
    "paceline.measure:MeasureConfig",
    "paceline.measure:measure",
    _measured,
    page="paceline.view.measure_pages:measure_page",
    is_verdict=True,
)
_COMPARED = Verb(
    "paceline.measure:MeasureConfig",
    "paceline.measure:measure_drafts",
    _compared,
    page="paceline.view.measure_pages:drafts_page",
    is_verdict=True,
)
_SERVED = Verb(
    "paceline.measure.served:ServedConfig",
    "paceline.measure.served:measure_served",
    _served,
    page="paceline.view.measure_pages:served_page",
    is_verdict=True,
)


def _verify_as_json(report: "LosslessnessReport") -> str:
    verdict = {"passed": report.passed, "verdict": report.word}
    return json.dumps(report.model_dump(mode="json") | verdict, indent=2)


@MEASURE.verb(
    "paceline.measure:VerifyConfig",
    "paceline.measure:verify_losslessness",
    as_json=_verify_as_json,
    page="paceline.view.measure_pages:verify_page",
    is_verdict=True,
)
def verify(result: "LosslessnessReport", _config: "VerifyConfig") -> "Shown":
    """Test that decoding with a draft is lossless.

    Compares greedy texts token by token, and sampled texts by a G-test. Exit code 1: a test failed;
    3: the broken rule of --self-test was not caught, so more texts are needed.
    """
    from paceline.cli.result_tables import losslessness_lines

    yield from losslessness_lines(result)
    return result.exit_code


@MEASURE.command("paceline.measure.trajectory:TrajectoryConfig")
def trajectory(
    call: Call,
    dry_run: options.DryRun = False,
    html: options.Html = None,
) -> None:
    """Measure every checkpoint of training runs.

    Reports tokens per target call of the initial draft and of each checkpoint on several tasks.
    Needs the key tasks; see configs/direct/trajectory.yaml.
    """
    from paceline.cli.tables import printed
    from paceline.measure.trajectory import TrajectoryConfig
    from paceline.measure.trajectory import trajectory as run
    from paceline.view.tables import trajectory_tables

    check_html(html)
    config = call.build(TrajectoryConfig)
    call.check(config, dry_run=dry_run)
    with progress_bars() as progress:
        rows = run(config, progress)
    stdout.print(printed(*trajectory_tables(rows)))
    stdout.print(f"rows are in {config.output}/rows.jsonl")
    if html is not None:
        from paceline.records import RunDirectory
        from paceline.view.training_pages import trajectory_page

        manifest = RunDirectory(config.output).read_manifest()
        write_html(html, lambda: trajectory_page(rows, manifest))


@MEASURE.verb("paceline.bench.score:ScoreConfig", "paceline.bench.score:score", as_json=True)
def score(result: "Score", config: "ScoreConfig") -> "Shown":
    """Score a model behind a URL on a task.

    Asks the server for answers to test examples and scores them as bench does. Needs the key task.
    """
    from math import isnan

    quality = "no metric" if result.score is None else f"{result.metric} {result.score}"
    yield f"{quality} on {result.num_examples:,} examples, {', '.join(result.servers)}"
    for name, value in result.corpus_scores.items():
        yield f"{name} {f'{value.value:.2f}' if isnan(value.low) else value.text('.2f')}"
    yield (
        f"{result.num_tokens:,} tokens, {result.num_cut:,} answers cut at max_new_tokens "
        f"{config.max_new_tokens}; answers are in {config.output}/metrics.jsonl"
    )


@MEASURE.verb(
    "paceline.measure.perplexity:PerplexityConfig",
    "paceline.measure.perplexity:perplexity",
    as_json=True,
)
def perplexity(result: "Perplexity", _config: "PerplexityConfig") -> "Shown":
    """Measure how well a model predicts plain text.

    Perplexity compares models with the same tokenizer, bits per byte any models.
    """
    yield f"perplexity     {result.perplexity}"
    yield f"bits per byte  {result.bits_per_byte}"
    yield (
        f"on {result.num_tokens:,} tokens, {result.num_bytes:,} bytes, {result.num_documents:,} "
        "documents; 95% intervals over documents"
    )


@MEASURE.verb(
    "paceline.measure.analysis:AnalyzeConfig",
    "paceline.measure.analysis:analyze",
    as_json=True,
)
def analyze(result: "PredictedFrontier", _config: "AnalyzeConfig") -> "Shown":
    """Predict quality and speed of each rule.

    Nothing is decoded with a rule: one forward pass of each model over text gives rejection rate,
    distance from the target's distribution and predicted speedup of each rule at each threshold.
    """
    from paceline.cli.result_tables import disturbed_line
    from paceline.cli.tables import printed
    from paceline.view.tables import frontier_table

    yield printed(frontier_table(result))
    yield from disturbed_line(result.disturbance)
