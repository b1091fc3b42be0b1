"""Tables and lines that print measurements and tests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table as Grid
from rich.text import Text

from paceline.cli.tables import printed
from paceline.measure.engine_costs import words_of_starts
from paceline.measure.losslessness import OPEN_QUESTION
from paceline.measure.results import ACCEPTANCE, gamma_of, num_tokens
from paceline.results.figures import FIGURES
from paceline.view.page import meaning_of, words_of
from paceline.view.tables import before_and_after, gamma_table, served_tables, steps_table

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from rich.console import RenderableType

    from paceline.export.model_report import ModelReport, TrainedText
    from paceline.measure.losslessness import DistributionCheck, LosslessnessReport
    from paceline.measure.measurement import Measurement
    from paceline.measure.served import ServedMeasurement
    from paceline.train.config import Evaluation


_EVALUATED = (
    *("expected_acceptance", "greedy_agreement", "block_efficiency"),
    *("rule_acceptance", "rule_tvd"),
)


def measurement_table(found: Measurement) -> Group:
    """Acceptance and cost, a row per gamma, and the measured speedup."""
    summary = Grid.grid(padding=(0, 2))
    texts, sampling = found.texts, found.config.sampling
    summary.add_row(
        "text",
        f"{num_tokens(texts)} target tokens after {len(texts.units)} prompts, temperature "
        f"{sampling.temperature:g}, top-p {sampling.top_p:g}, top-k {sampling.top_k}",
    )
    notes: dict[str, str] = {}
    for name in ACCEPTANCE:
        words = words_of(name)
        summary.add_row(words, str(found.figure(name)))
        notes[words] = meaning_of(name)
    brackets = {"brackets": "95% intervals over prompts."}
    table = printed(gamma_table(found), notes=notes | brackets)
    if not found.verdict.timed:
        return Group(summary, table)
    cost = texts.totals
    ms = {name: f"{cost[name] * 1e3:.1f} ms" for name in cost if name.endswith("_s")}
    target, draft = ms["target_pass_s"], ms["draft_pass_s"]
    if found.engine:
        count = found.config.concurrency
        batch = "" if count == 1 else f" of {count} requests"
        summary.add_row(f"one step{batch} in {found.engine}", f"{target} without the draft")
        return Group(summary, table, *_speed_lines(found))
    ratio = f"cost ratio {cost['cost_ratio']:.3f}"
    summary.add_row("one pass", f"target {target}, draft {draft}, {ratio}")
    return Group(summary, table, *_speed_lines(found), *disturbed_line(found.disturbance))


def disturbed_line(disturbance: str) -> list[Text]:
    """A line about disturbed timings, if they were."""
    return [Text(f"warning: {disturbance}", style="bold yellow")] if disturbance else []


def model_lines(report: ModelReport) -> Iterator[str]:
    """What was read in a model."""
    for name, value in report.facts.items():
        yield f"{name:<20} {value}"
    yield from example_lines(report.examples)
    for warning in report.warnings:
        yield f"{'warning':<20} {warning}"
    for fault in report.faults:
        yield f"{'failed':<20} {fault}"


def example_lines(examples: Iterable[TrainedText]) -> Iterator[str]:
    """Texts as alignment would use them; the trained part is in brackets."""
    for example in examples:
        yield (
            f"{'example':<20} {example.where}: {example.num_given} tokens given, "
            f"{len(example.trained_tokens)} trained [[...]]"
        )
        yield f"{example.given}[[{example.trained}]]"


def _speed_lines(found: Measurement) -> Iterator[str]:
    if found.expected is not None:
        engine = f" in {found.engine}" if found.engine else ""
        yield (
            f"expected speedup{engine} {found.expected} at gamma {found.verdict.gamma}, after the "
            "first token"
        )
    if (requests := found.requests) is None:
        return
    names = "target_tokens_per_s", "tokens_per_s", "engine_efficiency", "predicted_speedup"
    alone, drafted, part, predicted = (FIGURES[name].value(requests) for name in names)
    yield (
        f"measured speedup {found.figure('speedup', requests)} at gamma {gamma_of(requests)}: "
        f"{alone:.1f} -> {drafted:.1f} tokens/s"
    )
    yield (
        f"after the first token {found.figure('decoding_speedup', requests)}, {part:.2f} of "
        f"{predicted:.3f}, predicted with the blocks and the pass times of these requests"
    )


def served_lines(found: ServedMeasurement) -> Iterator[RenderableType]:
    """Served and predicted figures, then speedup and step costs."""
    engine = f"{found.engine} {found.engine_version}".strip()
    yield (
        f"{found.num_requests} requests, {found.num_tokens} tokens, served by {engine}, "
        f"{found.config.num_speculative_tokens} tokens per block"
    )
    yield printed(*served_tables(found))
    if (speed := found.speed) is not None:
        yield (
            f"measured speedup {speed.speedup}: {speed.plain_tokens_per_s:.1f} -> "
            f"{speed.speculative_tokens_per_s:.1f} tokens/s, whole requests"
        )
    if found.costs is not None:
        yield printed(steps_table(found.costs))
    if speed is not None or found.costs is not None:
        yield words_of_starts(found.starts)


def alignment_table(result: dict[str, Any], evaluation: Evaluation) -> Group:
    """Held-out figures before and after alignment, from the `result` of an `align` run."""
    known = [name for name in _EVALUATED if name in result["after"]]
    gamma = f", gamma {evaluation.gamma}" if "block_efficiency" in known else ""
    remark = (
        f"On {result['after']['num_tokens']:,.0f} held-out tokens of the target, temperature "
        f"{evaluation.sampling.temperature:g}{gamma}."
    )
    table = before_and_after(result["before"], result["after"], known, remark)
    return printed(table, notes={words_of(name): meaning_of(name) for name in known})


def losslessness_lines(report: LosslessnessReport) -> Iterator[str]:
    """A line per losslessness test: result, sample size and statistic."""
    greedy, counts = report.greedy, report.greedy.counts
    line = f"{counts['identical']} of {counts['prompts']} texts ({counts['tokens']} tokens) equal"
    if counts["ties"]:
        line += f", {counts['ties']} differ at a tie of the target's logits"
    if greedy.first_difference:
        line += f"; first difference: {greedy.first_difference}"
    yield f"greedy:  {'passed' if greedy.passed else 'FAILED'}  {line}"
    sampled = report.distribution
    yield f"sampled: {'passed' if sampled.passed else 'FAILED'}  {_describe(sampled)}"
    yield f"compared with {report.reference}"
    if (broken := report.broken_distribution) is not None:
        yield f"broken rule: {'NOT CAUGHT' if broken.passed else 'caught'}; {_describe(broken)}"
    if report.word == "UNDECIDED":
        yield f"UNDECIDED: both tests passed, but {OPEN_QUESTION}"


def _describe(check: DistributionCheck) -> str:
    counts = check.counts
    return (
        f"G {check.row.totals['g_statistic']:.1f} over {counts['cells']} cells of "
        f"{counts['tokens']} tokens, p {check.p_value:.2g} (a lossless rule falls below "
        f"{check.false_alarm:g} once in {1 / check.false_alarm:,.0f} runs)"
    )
