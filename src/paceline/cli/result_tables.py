"""Measurements and proofs as a person reads them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table

from paceline.bench.schema import family, parameters_of, setting
from paceline.measure.trajectory import name_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paceline.bench.tune import Tried, Tuned
    from paceline.core.bootstrap import Interval
    from paceline.core.rule_base import Rule
    from paceline.measure.losslessness import DistributionCheck, LosslessnessReport
    from paceline.measure.measurement import Measurement
    from paceline.measure.predicted_frontier import PredictedFrontier
    from paceline.measure.results import IntervalRow
    from paceline.measure.trajectory import TrajectoryRow
    from paceline.measure.verdict import Verdict
    from paceline.train.align_config import Evaluation
    from paceline.train.sweep import Sweep


_GAMMA_LEGEND = """\
expected acceptance: part of sampled drafts that the target accepts. greedy draft acceptance: of drafts that
are the draft's likeliest token. greedy agreement: how often both models find the same token likeliest.
gamma: tokens drafted per block, * where the expected speedup is largest. tokens per target call: tau, the
mean length of a block's text. break-even acceptance: what a draft must reach at this gamma to gain anything.
predicted speedup: tau / (cost ratio * gamma + 1). block cost: target pass over a block / over one token.
expected speedup: tau / cost of a block, measured here. MBSU: the predicted speedup with the ratio of
parameters as cost ratio. In brackets: 95% intervals over prompts."""
_ENGINE_LEGEND = """\
greedy draft acceptance: part of the draft's likeliest tokens that the target accepts. greedy agreement: how
often both models find the same token likeliest. gamma: tokens drafted per block, * where it pays most. tokens
per target call: tau, the mean length of a block's text. block: what a block takes in the engine, drafting
included; ~ interpolated. needed: block / step without the draft, which tau must exceed to gain anything.
break-even acceptance: the acceptance that gives such a tau if all tokens are alike. expected speedup: tau /
needed; a text's last block may be shorter. In brackets: 95% intervals over prompts."""
_TUNED_LEGEND = (
    "quality: mean score, or its part of the target's own; speedup: seconds per token of the target alone / of "
    "the setting; met: whether the bound is kept. In brackets: 95% intervals over examples."
)
_TRAJECTORY_LEGEND = (
    "acceptance: expected part of drafted tokens that the target accepts; tau: tokens per target call; MBSU: "
    "memory-bound speedup, tau / (parameter ratio * gamma + 1). In brackets: 95% intervals over prompts."
)
_SWEEP_LEGEND = "Each cell: mean over seeds and half the width of its 95% interval (Student's t)."


def measurement_table(found: Measurement) -> Group:
    """Acceptance and cost, then a row a gamma, then the timing."""
    summary = Table.grid(padding=(0, 2))
    text, cost = found.acceptance, found.cost
    sampling = found.config.sampling
    shape = (
        f"temperature {sampling.temperature:g}, top-p {sampling.top_p:g}, top-k {sampling.top_k}"
    )
    summary.add_row(
        "text", f"{text.num_tokens} target tokens after {text.num_prompts} prompts, {shape}"
    )
    summary.add_row("expected acceptance", str(text.expected_acceptance))
    summary.add_row("greedy draft acceptance", str(text.greedy_draft_acceptance))
    summary.add_row("greedy agreement", str(text.greedy_agreement))
    target, draft = (f"{one * 1e3:.1f} ms" for one in (cost.target_pass_s, cost.draft_pass_s))
    if cost.engine:
        count = found.config.concurrency
        together = "" if count == 1 else f" of {count} requests"
        summary.add_row(f"one step{together} in {cost.engine}", f"{target} without the draft")
        return Group(summary, _engine_table(found), _ENGINE_LEGEND, *_speed_lines(found))
    summary.add_row("one pass", f"target {target}, draft {draft}, cost ratio {cost.cost_ratio:.3f}")
    return Group(summary, _gamma_table(found), _GAMMA_LEGEND, *_speed_lines(found))


def verdict_style(verdict: Verdict) -> str:
    """Green for GO, red for NO-GO, yellow without a verdict."""
    if not verdict.decided:
        return "bold yellow"
    return "bold green" if verdict.go else "bold red"


def _gamma_table(found: Measurement) -> Table:
    table = Table(
        "gamma",
        "tokens per target call",
        "break-even acceptance",
        "predicted speedup",
        "block cost",
        "expected speedup",
        "MBSU",
        box=None,
        pad_edge=False,
    )
    for column in table.columns:
        column.justify = "right"
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


def _engine_table(found: Measurement) -> Table:
    """A row a gamma, with an engine's costs."""
    names = (
        *("gamma", "tokens per target call", "needed", "break-even acceptance"),
        *("block", "expected speedup"),
    )
    table = Table(*names, box=None, pad_edge=False)
    for column in table.columns:
        column.justify = "right"
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
        yield f"expected speedup in {found.cost.engine} {found.expected}, from the first token on"
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
        f"from the first token on {speed.decoding_speedup}, "
        f"{speed.measured_over_predicted:.2f} of the predicted {speed.predicted_speedup:.3f}"
    )


def alignment_table(result: dict[str, Any], evaluation: Evaluation) -> Group:
    """Figures on held-out text before and after; `result` is an aligned run's."""
    table = Table("", "before", "after", box=None, pad_edge=False)
    names = {
        "expected_acceptance": "expected acceptance",
        "greedy_agreement": "greedy agreement",
        "block_efficiency": f"tokens per target call, gamma {evaluation.gamma}",
        "rule_acceptance": "acceptance under the rule",
        "rule_tvd": "TVD to the target under the rule",
    }
    for key, name in names.items():
        if key in result["after"]:
            table.add_row(name, *(_evaluated(result[when], key) for when in ("before", "after")))
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
    return f"{figures[key]:.3f} ({figures[f'{key}_low']:.3f}-{figures[f'{key}_high']:.3f})"


def losslessness_lines(report: LosslessnessReport) -> Iterator[str]:
    """What was proved, on how much, at what odds."""
    greedy = report.greedy
    same = (
        f"{greedy.num_identical} of {greedy.num_prompts} texts ({greedy.num_tokens} tokens) equal"
    )
    if greedy.num_ties:
        same += f", {greedy.num_ties} part at a tie of the target's logits"
    fault = f"; first difference: {greedy.first_difference}" if greedy.first_difference else ""
    yield f"greedy:  {_mark(greedy.passed)}  {same}{fault}"
    yield f"sampled: {_mark(report.distribution.passed)}  {_describe(report.distribution)}"
    if (broken := report.broken_distribution) is not None:
        verdict = (
            "caught" if not broken.passed else "NOT CAUGHT: sample more tokens (--set num_prompts)"
        )
        yield f"broken rule: {verdict}; {_describe(broken)}"


def _mark(passed: bool) -> str:
    return "passed" if passed else "FAILED"


def _describe(check: DistributionCheck) -> str:
    beyond = f", {check.num_impossible} impossible" if check.num_impossible else ""
    if check.num_border:
        beyond += f", {check.num_border} left out at the border of top-k or top-p"
    return (
        f"G {check.g_statistic:.1f} over {check.num_cells} cells of {check.num_tokens} tokens{beyond}, "
        f"p {check.p_value:.2g} (a lossless rule falls below {check.false_alarm:g} once in "
        f"{1 / check.false_alarm:,.0f} runs)"
    )


def frontier_table(found: PredictedFrontier) -> Group:
    """A row a rule, and what the figures are of."""
    table = Table(
        "rule",
        "rejected",
        "TVD",
        "KL",
        "surprisal",
        "tau",
        "gamma",
        "speedup",
        box=None,
        pad_edge=False,
        padding=(0, 1, 0, 0),  # all of it in 80 columns, the longest names on two lines
    )
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
    writer = found.config.text
    remark = (
        f"on {found.num_tokens} tokens of the {writer}'s, temperature "
        f"{found.config.sampling.temperature:g}, cost ratio {found.cost_ratio:.3f}; TVD and KL (nats) "
        "of what a rule makes to the target; surprisal (nats): how unlikely the target finds it; rejected: part "
        "of the drafted tokens; tau (tokens per target call) and speedup as predicted at the best gamma"
    )
    return Group(table, remark)


def rule_name(rule: Rule) -> str:
    """`chow 0.4`: the name, then what was chosen."""
    chosen = parameters_of(rule).values()
    return " ".join([rule.name, *(f"{v:g}" if isinstance(v, float) else str(v) for v in chosen)])


def tuned_table(found: Tuned) -> Group:
    """Everything that was measured: to choose on, and then to confirm on."""
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
    steps = [] if costs is None else [f"speedups: from the costs of an engine's steps in {costs}"]
    return Group(table, *steps, _TUNED_LEGEND)


def _met(one: Tried, quality_floor: float | None) -> str:
    measured = one.relative_quality.value if one.relative_quality else math.inf
    if one.met and quality_floor is not None and measured < quality_floor:
        return "by proof"
    return "yes" if one.met else "no"


def _short(figure: IntervalRow) -> str:
    return f"{figure.value:.2f} ({figure.low:.2f}-{figure.high:.2f})"


def trajectory_tables(rows: Sequence[TrajectoryRow]) -> Group:
    """A table a task and sampling; a row a draft: where it stands in its run, and what it is worth."""
    gammas = sorted({gamma for row in rows for gamma in row.block_efficiency})
    parts: dict[str, list[TrajectoryRow]] = {}
    for row in rows:
        parts.setdefault(f"{row.task}, {name_of(row.sampling)}", []).append(row)
    return Group(
        *(part for name, own in parts.items() for part in (name, _drafts(own, gammas), "")),
        _TRAJECTORY_LEGEND,
    )


def _drafts(rows: Sequence[TrajectoryRow], gammas: Sequence[int]) -> Table:
    table = Table("run", "at", "acceptance", box=None, pad_edge=False)
    for gamma in gammas:
        table.add_column(f"tau, gamma {gamma}", justify="right")
        table.add_column("MBSU", justify="right")
    for row in rows:
        taus = [
            text for gamma in gammas for text in (_tau(row, gamma), _number(row.mbsu.get(gamma)))
        ]
        accepted = f"{row.expected_acceptance.value:.3f}"
        table.add_row(row.stop.run.name, row.stop.label, accepted, *taus)
    return table


def _tau(row: TrajectoryRow, gamma: int) -> str:
    tau = row.block_efficiency.get(gamma)
    return "" if tau is None else _short(tau)


def sweep_tables(found: Sweep) -> Group:
    """The figure of every cell, then each row less the reference."""
    config = found.config
    cells = _seeds_table("", *config.columns)
    for row in config.rows:
        cells.add_row(
            _in_words(row), *(_interval(found.cell(row, column)) for column in config.columns)
        )
    less = _seeds_table(f"less {_in_words(found.reference)}", *config.columns, "all")
    for row in config.rows:
        if row != found.reference:
            each = (found.difference(row, found.reference, [name]) for name in config.columns)
            whole = found.difference(row, found.reference)
            less.add_row(_in_words(row), *(_interval(part) for part in (*each, whole)))
    seeds = f"{config.figure}, mean and 95% interval over {len(config.seeds)} seeds"
    return Group(seeds, cells, "", "paired by text and seed", less, _SWEEP_LEGEND)


def _in_words(name: str) -> str:
    return name.replace("_", " ")


def _seeds_table(corner: str, *columns: str) -> Table:
    """Numbers and words stay whole; a row's name takes as many lines as it has to."""
    table = Table(box=None, pad_edge=False, collapse_padding=True)
    table.add_column(corner, min_width=len("acceptance"))
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _interval(interval: Interval) -> str:
    """Of a mean over seeds: as far to one side as to the other."""
    if math.isnan(interval.value):
        return "diverged"
    return f"{interval.value:.3f} ±{interval.high - interval.value:.3f}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
