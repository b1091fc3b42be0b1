"""Commands that measure drafts and models."""

import json
import shlex
from typing import TYPE_CHECKING

from paceline.cli import options
from paceline.cli.command import as_json_text, command, perform, verb
from paceline.cli.console import say

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
    from paceline.measure.speculators import SpeculatorsConfig, SpeculatorTable
    from paceline.measure.trajectory import TrajectoryConfig
    from paceline.results.row import Row

MEASURE = "Measure drafts and models"  # a panel of the help


_BY_OPTION = {
    "speculative-config": "paceline.measure.speculators:SpeculatorsConfig",
    "engine": "paceline.measure.served:ServedConfig",
}


@command(MEASURE, "paceline.measure:MeasureConfig", **_BY_OPTION)
def measure(
    config: "MeasureConfig | ServedConfig | SpeculatorsConfig",
    dry_run: options.DryRun = False,
    as_json: options.Json = False,
    table: options.Tables = False,
    html: options.Html = None,
    rows: options.Rows = None,
) -> None:
    """Measure acceptance and speed of a draft.

    Prints the verdict, the figures behind it and the next step. Exit code 1: NO-GO; 3: undecided or
    no verdict.
    With several --draft, compares them on the same texts. Exit code 0: one is GO; 1: all are NO-GO.
    With --engine, measures requests in the engine with and without the draft, and compares its
    counters with the prediction. Exit codes as above; of a running server, which has no requests
    without the draft, 1: the counters differ; 3: undecided.
    With --engine vllm --speculative-config JSON, measures methods of vLLM side by side, at several
    numbers of concurrent requests (--loads). Exit code 0: one is GO; 1: all are NO-GO.
    With --costs, predicts the speedup in the engine that the costs were measured in.
    """
    from paceline.measure import MeasureConfig
    from paceline.measure.speculators import SpeculatorsConfig

    how = ("paceline.measure.served:measure_served", _served, "served_page")
    if isinstance(config, MeasureConfig) and config.other_drafts:
        how = ("paceline.measure:measure_drafts", _compared, "drafts_page")
    elif isinstance(config, SpeculatorsConfig):
        how = ("paceline.measure.speculators:measure_speculators", _speculators, "speculators_page")
    elif isinstance(config, MeasureConfig):
        how = ("paceline.measure:measure", _measured, "measure_page")
    function, show, page = how
    perform(
        config,
        function,
        show,
        page=f"paceline.view.measure_pages:{page}",
        dry_run=dry_run,
        as_json=as_json,
        table=table,
        html=html,
        rows=rows,
    )


def _measured(result: "Measurement", _config: "MeasureConfig") -> "Shown":
    from paceline.cli.result_tables import measurement_table, verdict_lines
    from paceline.cli.tables import Details

    yield Details(measurement_table(result))
    yield from verdict_lines(result)
    return result.verdict.exit_code


def _compared(result: "DraftComparison", _config: "MeasureConfig") -> "Shown":
    from paceline.cli.result_tables import verdict_lines
    from paceline.cli.tables import Details, printed
    from paceline.view.tables import drafts_table

    yield Details(printed(drafts_table(result)))
    for found in result.measurements:
        yield f"draft: {found.config.draft}"
        yield from verdict_lines(found)
    yield result.conclusion
    return result.exit_code


def _speculators(result: "SpeculatorTable", _config: "SpeculatorsConfig") -> "Shown":
    from paceline.cli.result_tables import speculator_lines

    yield from speculator_lines(result)
    return result.exit_code


def _served(result: "ServedMeasurement", _config: "ServedConfig") -> "Shown":
    from paceline.cli.result_tables import served_lines
    from paceline.measure.served import save_costs

    yield from served_lines(result)
    save_costs(result)  # last, so that a full disk does not lose the figures
    if result.config.write_costs is not None:
        say(f"costs written to {result.config.write_costs.file}")
    return result.exit_code


def _verify_as_json(report: "LosslessnessReport") -> str:
    verdict = {"passed": report.passed, "verdict": report.word}
    return json.dumps(report.model_dump(mode="json") | verdict, indent=2)


@verb(
    MEASURE,
    "paceline.measure:VerifyConfig",
    "paceline.measure:verify_losslessness",
    json_of=_verify_as_json,
    page="paceline.view.measure_pages:verify_page",
)
def verify(result: "LosslessnessReport", _config: "VerifyConfig") -> "Shown":
    """Test that decoding with a draft is lossless.

    Compares greedy texts token by token, and sampled texts by a G-test. Exit code 1: a test failed;
    3: more texts are needed, because the tokens are too few or the broken rule was not caught.
    """
    from paceline.cli.result_tables import losslessness_lines

    yield from losslessness_lines(result)
    return result.exit_code


@verb(
    MEASURE,
    "paceline.measure.trajectory:TrajectoryConfig",
    "paceline.measure.trajectory:trajectory",
    page="run",
)
def trajectory(rows: "list[Row]", config: "TrajectoryConfig") -> "Shown":
    """Measure every checkpoint of training runs.

    Reports tokens per target call of the initial draft and of each checkpoint on several tasks.
    Needs the key tasks; see configs/direct/trajectory.yaml.
    """
    from paceline.cli.tables import printed
    from paceline.view.tables import trajectory_tables

    yield printed(*trajectory_tables(rows))
    yield f"rows are in {config.output}/rows.jsonl"


@verb(
    MEASURE, "paceline.bench.score:ScoreConfig", "paceline.bench.score:score", json_of=as_json_text
)
def score(result: "Score", config: "ScoreConfig") -> "Shown":
    """Score a model behind a URL on a task.

    Asks the server for answers to test examples and scores them as bench does. Needs the key task.
    """
    from paceline.view.page import interval_text

    quality = "no metric" if result.score is None else f"{result.metric} {result.score}"
    yield f"{quality} on {result.num_examples:,} examples, {', '.join(result.servers)}"
    for name, value in result.corpus_scores.items():
        yield f"{name} {interval_text(value, '.2f')}"
    yield (
        f"{result.num_tokens:,} tokens, {result.num_cut:,} answers cut at max_new_tokens "
        f"{config.max_new_tokens}; answers are in {config.output}/metrics.jsonl"
    )


@verb(
    MEASURE,
    "paceline.measure.perplexity:PerplexityConfig",
    "paceline.measure.perplexity:perplexity",
    json_of=as_json_text,
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


@verb(
    MEASURE,
    "paceline.measure.analysis:AnalyzeConfig",
    "paceline.measure.analysis:analyze",
    json_of=as_json_text,
)
def analyze(result: "PredictedFrontier", config: "AnalyzeConfig") -> "Shown":
    """Predict quality and speed of each rule.

    Nothing is decoded with a rule: one forward pass of each model over text gives rejection rate,
    distance from the target's distribution and predicted speedup of each rule at each threshold.
    """
    from paceline.cli.result_tables import disturbed_line
    from paceline.cli.tables import printed
    from paceline.results.figures import FIGURES
    from paceline.view.tables import frontier_table

    for of in (None, *result.slices):
        yield printed(frontier_table(result, of))
    if result.disturbance:  # which says what to do, and the speedups are wrong
        yield from disturbed_line(result.disturbance)
        return
    best = max(result.fastest(), key=FIGURES["expected_speedup"].value)
    if best.setting["label"] == "lossless":
        yield "next: decode without a lossy rule: none is expected to be faster"
        return
    pair = shlex.join(["--target", config.target, "--draft", config.draft])
    yield f"next, on your task: paceline tune {pair} --task TASK --quality-floor 0.98 --output DIR"
