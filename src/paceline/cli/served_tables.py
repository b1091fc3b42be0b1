"""Tables of the figures measured in a serving engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table

from paceline.core.bootstrap import Interval

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.measure.engine_costs import StepCost
    from paceline.measure.results import IntervalRow
    from paceline.measure.served import ServedMeasurement

_LEGEND = """\
served: from the engine's counters. predicted: from the probabilities of both models on the texts
that the engine generated. tokens per target call: 1 + accepted tokens per block. draft acceptance
rate: accepted / drafted tokens. position i: fraction of blocks that accept draft token i (from 0).
Brackets: 95% intervals over requests."""


def served_table(found: ServedMeasurement) -> Group:
    """Served and predicted figures, then speedup and step costs."""
    engine = f"{found.engine} {found.engine_version}".strip()
    head = (
        f"{found.num_requests} requests, {found.num_tokens} tokens, served by {engine}, "
        f"{found.config.num_speculative_tokens} tokens per block"
    )
    table = Table("", "served", "predicted", box=None, pad_edge=False)
    for name, served, predicted in _rows(found):
        table.add_row(name, _cell(served), _cell(predicted))
    timed = [*_speed_lines(found), *_cost_lines(found)]
    return Group(head, table, _LEGEND, *timed, *([found.starts.words] if timed else []))


def _rows(
    found: ServedMeasurement,
) -> Iterator[tuple[str, IntervalRow | None, IntervalRow | None]]:
    served, predicted = found.served, found.predicted
    yield "tokens per target call", served.block_efficiency, predicted.block_efficiency
    yield "draft acceptance rate", served.draft_acceptance_rate, predicted.draft_acceptance_rate
    theirs, ours = served.acceptance_by_position or [], predicted.acceptance_by_position or []
    for position, row in enumerate(ours):
        yield f"position {position}", theirs[position] if theirs else None, row


def _cell(row: IntervalRow | None) -> str:
    return "not reported" if row is None else str(row)


def _speed_lines(found: ServedMeasurement) -> Iterator[str]:
    if (speed := found.speed) is None:
        return
    yield (
        f"measured speedup {speed.speedup}: {speed.plain_tokens_per_s:.1f} -> "
        f"{speed.speculative_tokens_per_s:.1f} tokens/s, whole requests"
    )
    num_different = found.num_requests - speed.num_equal
    yield f"{speed.num_equal} of {found.num_requests} texts are equal with and without the draft"
    if speed.num_near_ties is not None and num_different:
        yield f"{speed.num_near_ties} of {num_different} others differ at a near-tie of the logits"


def _cost_lines(found: ServedMeasurement) -> Iterator[str]:
    if found.costs is None:
        return
    for size in found.costs.batch_sizes:
        steps = [_step(step) for step in found.costs.steps if step.batch_size == size]
        yield f"ms per step, {size} request{'s' if size > 1 else ''} at a time: {', '.join(steps)}"


def _step(step: StepCost) -> str:
    name = f"block of {step.gamma}" if step.gamma else "without the draft"
    seconds = step.seconds
    milliseconds = Interval(*(1e3 * each for each in (seconds.value, seconds.low, seconds.high)))
    return f"{name} {milliseconds.text('.1f')}"
