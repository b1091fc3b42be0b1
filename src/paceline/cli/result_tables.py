"""Tables and lines that print measurements, tests and sweeps."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table

from paceline.bench.settings import family, parameters_of, setting
from paceline.core.bootstrap import Interval
from paceline.measure.trajectory import START, draft_name, gain_of
from paceline.models.compatibility import UNTIMED
from paceline.results.figures import FIGURES
from paceline.view.definitions import words_of
from paceline.view.page import case_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paceline.bench.tune import Tried, Tuned
    from paceline.core.rule_base import Rule
    from paceline.export.model_report import ModelReport
    from paceline.measure.agreement import Agreement
    from paceline.measure.analysis import PredictedFrontier
    from paceline.measure.losslessness import DistributionCheck, LosslessnessReport
    from paceline.measure.measurement import Measurement
    from paceline.measure.results import IntervalRow
    from paceline.measure.verdict import Verdict
    from paceline.results.row import Row
    from paceline.train.config import Evaluation
    from paceline.train.sweep import Sweep


_ACCEPTANCE_LEGEND = """\
expected acceptance: fraction of sampled draft tokens that the target accepts
greedy draft acceptance: the same if the draft proposes its most likely token
greedy agreement: fraction of positions with the same most likely token in both models
gamma: draft tokens per block; * marks the one to serve, if the verdict is GO
tokens per target call: tau, the mean number of tokens per block"""
_GAMMA_LEGEND = f"""{_ACCEPTANCE_LEGEND}
break-even acceptance: acceptance above which this gamma gives a speedup
predicted speedup: tau / (cost ratio * gamma + 1)
block cost: target pass over a block / target pass over one token
expected speedup: tau / measured cost of a block
MBSU: memory-bound speedup, tau / (parameter ratio * gamma + 1)
Brackets: 95% intervals over prompts."""
_UNTIMED_LEGEND = f"""{_ACCEPTANCE_LEGEND}
MBSU: memory-bound speedup, tau / (parameter ratio * gamma + 1)
Brackets: 95% intervals over prompts."""
_ENGINE_LEGEND = f"""{_ACCEPTANCE_LEGEND}
needed: block / step without the draft; tau must be larger for a speedup
break-even acceptance: acceptance that gives this tau if it is the same for all tokens
block: time per block in the engine, drafting included; ~ interpolated
expected speedup: tau / needed; the last block of a text may be shorter
Brackets: 95% intervals over prompts."""
_EVALUATED = (
    *("expected_acceptance", "greedy_agreement", "block_efficiency"),
    *("rule_acceptance", "rule_tvd"),
)
_TUNED_LEGEND = """\
quality: mean score; of the target's: as a fraction of the target's score
speedup: time per token of the target alone / of the setting; met: whether the bound is met
Brackets: 95% intervals over examples."""
_TRAJECTORY_LEGEND = """\
acceptance: expected fraction of draft tokens that the target accepts
quality: mean score of the draft's own answers
tau: tokens per target call; gain: tau / tau of the run's initial draft, on the same texts
MBSU: memory-bound speedup, tau / (parameter ratio * gamma + 1)
Brackets: 95% intervals over prompts."""
_SWEEP_LEGEND = "Each cell: mean over seeds and half the width of its 95% interval (Student's t)."


def measurement_table(found: Measurement) -> Group:
    """Acceptance and cost, a row per gamma, and the measured speedup."""
    summary = Table.grid(padding=(0, 2))
    text, cost, sampling = found.acceptance, found.cost, found.config.sampling
    summary.add_row(
        "text",
        f"{text.num_tokens} target tokens after {text.num_prompts} prompts, temperature "
        f"{sampling.temperature:g}, top-p {sampling.top_p:g}, top-k {sampling.top_k}",
    )
    summary.add_row("expected acceptance", str(text.expected_acceptance))
    summary.add_row("greedy draft acceptance", str(text.greedy_draft_acceptance))
    summary.add_row("greedy agreement", str(text.greedy_agreement))
    if not found.verdict.timed:
        return Group(summary, _untimed_table(found), _UNTIMED_LEGEND)
    target, draft = (f"{one * 1e3:.1f} ms" for one in (cost.target_pass_s, cost.draft_pass_s))
    if cost.engine:
        count = found.config.concurrency
        batch = "" if count == 1 else f" of {count} requests"
        summary.add_row(f"one step{batch} in {cost.engine}", f"{target} without the draft")
        return Group(summary, _engine_table(found), _ENGINE_LEGEND, *_speed_lines(found))
    summary.add_row("one pass", f"target {target}, draft {draft}, cost ratio {cost.cost_ratio:.3f}")
    if cost.target_start_s is not None and cost.draft_start_s is not None:
        starts = [f"{one * 1e3:.1f} ms" for one in (cost.target_start_s, cost.draft_start_s)]
        once = f"target {starts[0]}, draft {starts[1]}, once per request"
        summary.add_row("encoder and first pass", once)
    return Group(summary, _gamma_table(found), _GAMMA_LEGEND, *_speed_lines(found))


def model_lines(report: ModelReport) -> Iterator[str]:
    """What was read in a model, also in a dry run."""
    for name, value in report.facts.items():
        yield f"{name:<20} {value}"
    for use in report.uses:
        fault = "" if use.fault is None else f": {use.fault}"
        yield f"{'can' if use.fault is None else 'cannot':<20} {use.name}{fault}"
    for example in report.examples:
        yield (
            f"{'example':<20} {example.where}: {example.num_given} tokens given, "
            f"{len(example.trained_tokens)} trained [[...]]"
        )
        yield f"{example.given}[[{example.trained}]]"
    for warning in report.warnings:
        yield f"{'warning':<20} {warning}"
    for fault in report.faults:
        yield f"{'failed':<20} {fault}"


def verdict_style(verdict: Verdict | Agreement) -> str:
    """Green for a positive verdict, red for a negative one, yellow without a verdict."""
    return {0: "bold green", 1: "bold red"}.get(verdict.exit_code, "bold yellow")


def _right_aligned(*names: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in names:
        table.add_column(name, justify="right")
    return table


def _gamma_table(found: Measurement) -> Table:
    table = _right_aligned(
        *("gamma", "tokens per target call", "break-even acceptance", "predicted speedup"),
        *("block cost", "expected speedup", "MBSU"),
    )
    for row in found.gammas:
        needed = row.break_even_acceptance
        table.add_row(
            f"{row.gamma}{'*' if row.gamma == found.best_gamma else ''}",
            f"{row.block_efficiency:.3f}",
            "none" if needed is None else f"{needed:.3f}",
            f"{row.predicted_speedup:.3f}",
            f"{row.block_cost_ratio:.2f}",
            f"{row.expected_speedup:.3f}",
            f"{row.mbsu:.3f}",
        )
    return table


def _untimed_table(found: Measurement) -> Table:
    table = _right_aligned("gamma", "tokens per target call", "MBSU")
    for row in found.gammas:
        table.add_row(str(row.gamma), f"{row.block_efficiency:.3f}", f"{row.mbsu:.3f}")
    return table


def _engine_table(found: Measurement) -> Table:
    table = _right_aligned(
        *("gamma", "tokens per target call", "needed", "break-even acceptance"),
        *("block", "expected speedup"),
    )
    step_s = found.cost.target_pass_s
    for row in found.gammas:
        needed, block_s = row.break_even_acceptance, row.block_s or math.nan
        timed = row.gamma in found.timed_gammas
        table.add_row(
            f"{row.gamma}{'*' if row.gamma == found.best_gamma else ''}",
            f"{row.block_efficiency:.3f}",
            f"{block_s / step_s:.3f}",
            "none" if needed is None else f"{needed:.3f}",
            f"{block_s * 1e3:.1f} ms{'' if timed else ' ~'}",
            f"{row.expected_speedup:.3f}",
        )
    return table


def _speed_lines(found: Measurement) -> Iterator[str]:
    if found.expected is not None:
        engine = f" in {found.cost.engine}" if found.cost.engine else ""
        yield (
            f"expected speedup{engine} {found.expected}, after the first token; its interval "
            "allows for the choice of gamma"
        )
    if (speed := found.speed) is None:
        return
    if found.tried:
        count = max(one.num_requests for one in found.tried)
        tried = ", ".join(f"{one.gamma}: {one.tokens_per_s:.1f}" for one in found.tried)
        yield f"tried on {count} other requests, tokens/s by gamma: {tried}"
    yield (
        f"measured speedup {speed.speedup} at gamma {speed.gamma}: "
        f"{speed.baseline_tokens_per_s:.1f} -> {speed.speculative_tokens_per_s:.1f} tokens/s"
    )
    yield (
        f"after the first token {speed.decoding_speedup}, {speed.measured_over_predicted:.2f} of "
        f"{speed.predicted_speedup:.3f}, predicted with the pass times during these requests"
    )


def alignment_table(result: dict[str, Any], evaluation: Evaluation) -> Group:
    """Held-out figures before and after alignment, from the `result` of an `align` run."""
    table = Table("", "before", "after", box=None, pad_edge=False)
    for key in _EVALUATED:
        if key in result["after"]:
            gamma = f", gamma {evaluation.gamma}" if key == "block_efficiency" else ""
            figures = (_evaluated(result[when], key) for when in ("before", "after"))
            table.add_row(f"{words_of(key)}{gamma}", *figures)
    remark = (
        f"on {result['after']['num_tokens']:,.0f} held-out tokens of the target, temperature "
        f"{evaluation.sampling.temperature:g}; 95% intervals over texts"
    )
    return Group(table, remark)


def _evaluated(figures: dict[str, float] | None, key: str) -> str:
    if figures is None or key not in figures:
        return "-"
    if f"{key}_low" not in figures:
        return f"{figures[key]:.3f}"
    return Interval(*(figures[key + end] for end in ("", "_low", "_high"))).text(between="-")


def losslessness_lines(report: LosslessnessReport) -> Iterator[str]:
    """A line per losslessness test: result, sample size and statistic."""
    greedy = report.greedy
    line = (
        f"{greedy.num_identical} of {greedy.num_prompts} texts ({greedy.num_tokens} tokens) equal"
    )
    if greedy.num_ties:
        line += f", {greedy.num_ties} differ at a tie of the target's logits"
    if greedy.first_difference:
        line += f"; first difference: {greedy.first_difference}"
    yield f"greedy:  {'passed' if greedy.passed else 'FAILED'}  {line}"
    sampled = report.distribution
    yield f"sampled: {'passed' if sampled.passed else 'FAILED'}  {_describe(sampled)}"
    yield f"compared with {report.reference}"
    if (broken := report.broken_distribution) is not None:
        verdict = (
            "NOT CAUGHT: sample more tokens (--set num_prompts)" if broken.passed else "caught"
        )
        yield f"broken rule: {verdict}; {_describe(broken)}"


def _describe(check: DistributionCheck) -> str:
    counts = f", {check.num_impossible} impossible" if check.num_impossible else ""
    if check.num_border:
        counts += f", {check.num_border} excluded at the border of top-k or top-p"
    return (
        f"G {check.g_statistic:.1f} over {check.num_cells} cells of {check.num_tokens} tokens"
        f"{counts}, p {check.p_value:.2g} (a lossless rule falls below {check.false_alarm:g} "
        f"once in {1 / check.false_alarm:,.0f} runs)"
    )


def frontier_table(found: PredictedFrontier) -> Group:
    """A row per rule, and the definitions of the figures."""
    names = ("rule", "rejected", "TVD", "KL", "surprisal", "tau", "gamma", "speedup")
    # narrow padding: fits 80 columns
    table = Table(*names, box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for column in table.columns[1:]:
        column.no_wrap = True
        column.justify = "right"
    for row in found.rows:
        table.add_row(
            rule_name(row.rule),
            _short(row.rejection_rate),
            f"{row.tvd:.3f}",
            "inf" if row.kl is None else f"{row.kl:.3f}",
            f"{row.surprisal:.3f}",
            f"{row.block_efficiency[row.best_gamma]:.3f}",
            str(row.best_gamma),
            f"{row.predicted_speedup:.3f}",
        )
    untimed = "" if found.timed else f", that of the parameters: {UNTIMED}"
    remark = (
        f"on {found.num_tokens} tokens of the {found.config.text}, temperature "
        f"{found.config.sampling.temperature:g}, cost ratio {found.cost_ratio:.3f}{untimed}\n"
        "rejected: fraction of examined draft tokens; TVD and KL (nats): of target and output\n"
        "surprisal (nats): mean -log target probability of the output\n"
        "tau (tokens per target call) and speedup: predicted at the best gamma"
    )
    return Group(table, remark)


def rule_name(rule: Rule) -> str:
    """Name and parameters of a rule, such as `chow 0.4`."""
    chosen = parameters_of(rule).values()
    return " ".join([rule.name, *(f"{v:g}" if isinstance(v, float) else str(v) for v in chosen)])


def tuned_table(found: Tuned) -> Group:
    """A row per measured setting: first the choosing, then the confirming examples."""
    absolute = found.config.absolute_quality is not None
    name = "quality" if absolute else "of the target's"
    table = Table("setting", name, "speedup", "met", box=None, pad_edge=False)
    for column in table.columns:
        column.no_wrap = True
    confirming = False
    for one in found.tried:
        if one.examples == "confirming" and not confirming:
            confirming = True
            table.add_row("on other examples:")
        figures = (one.quality if absolute else one.relative_quality, one.speedup)
        cells = ["-" if figure is None else _short(figure) for figure in figures]
        label = f"{family(one.decoding)} {setting(one.decoding)}".strip()
        table.add_row(label, *cells, _met(one, found.config.quality_floor))
    for cell in found.failed:
        table.add_row(f"{family(cell.decoding)} {setting(cell.decoding)}: failed, {cell.error}")
    costs = found.config.costs
    steps = [] if costs is None else [f"speedups: from the engine's step costs in {costs}"]
    return Group(table, *steps, _TUNED_LEGEND)


def _met(one: Tried, quality_floor: float | None) -> str:
    measured = one.relative_quality.value if one.relative_quality else math.inf
    if one.met and quality_floor is not None and measured < quality_floor:
        return "by proof"
    return "yes" if one.met else "no"


def _short(figure: IntervalRow | Interval) -> str:
    return figure.text(".2f", "-")


def trajectory_tables(rows: Sequence[Row]) -> Group:
    """A table per task and sampling, with a row per checkpoint and gamma."""
    parts: dict[str, list[Row]] = {}
    for row in rows:
        parts.setdefault(case_of(row), []).append(row)
    return Group(
        *(part for name, own in parts.items() for part in (name, _drafts(own), "")),
        _TRAJECTORY_LEGEND,
    )


def _drafts(rows: Sequence[Row]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("draft", overflow="fold")
    scored = "score" in rows[0].sums
    for title in (*(["quality"] if scored else []), "acceptance", "gamma", "tau", "gain", "MBSU"):
        table.add_column(title, justify="right", no_wrap=True)
    before = None
    for row in rows:
        quality = [_short(FIGURES["quality"].measure(row))] if scored else []
        label = "" if row.has(label=START) else f" {row.setting['label']}"
        draft = [f"{draft_name(row)}{label}", *quality]
        draft.append(f"{FIGURES['expected_acceptance'].value(row):.3f}")
        shown = [""] * len(draft) if draft == before else draft
        gain = gain_of(row, rows)
        tau = _short(FIGURES["block_efficiency"].measure(row))
        mbsu = f"{FIGURES['mbsu'].value(row):.2f}"
        gains = "" if gain is None else _short(gain)
        table.add_row(*shown, str(row.setting["gamma"]), tau, gains, mbsu)
        before = draft
    return table


def sweep_tables(sweep: Sweep) -> Group:
    """The figure of each cell, then the difference of each row to the reference."""
    columns = sweep.names("column")
    cells = _seeds_table("", *columns)
    for row in sweep.names("row"):
        cells.add_row(_in_words(row), *(_interval(sweep.cell(row, column)) for column in columns))
    differences = _seeds_table(f"minus {_in_words(sweep.reference)}", *columns, "all")
    for row in sweep.names("row"):
        if row != sweep.reference:
            each = (sweep.difference(row, [name]) for name in columns)
            whole = sweep.difference(row)
            differences.add_row(_in_words(row), *(_interval(part) for part in (*each, whole)))
    seeds = f"{sweep.figure}, mean and 95% interval over {sweep.num_seeds} seeds"
    return Group(seeds, cells, "", "paired by text and seed", differences, _SWEEP_LEGEND)


def _in_words(name: str) -> str:
    return name.replace("_", " ")


def _seeds_table(corner: str, *columns: str) -> Table:
    """Only row names are wrapped."""
    table = Table(box=None, pad_edge=False, collapse_padding=True)
    table.add_column(corner, min_width=len("acceptance"))
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _interval(interval: Interval) -> str:
    if math.isnan(interval.value):
        return "diverged"
    return f"{interval.value:.3f} ±{interval.high - interval.value:.3f}"
