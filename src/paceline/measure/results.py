"""What the rows of measurements say: gammas, tokens, and whether timings were disturbed."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from paceline.results.figures import FIGURES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.results.row import Row

ACCEPTANCE = ("expected_acceptance", "greedy_draft_acceptance", "greedy_agreement")
_LEAST_BLOCK_COST = 0.9
_MOST_REVERSAL = 1.5


def disturbance(rows: Sequence[Row]) -> str:
    """Why no idle machine has the block costs of these rows; empty: one may, or an engine's.

    A block holds a target pass over more than one token, and more drafted tokens cost more. The
    costs of an idle machine deviate by some percent, where a processor has another code path for
    more tokens. A pass over a block of less than 0.9 target passes, or more than 1.5 times the cost
    of a block with more drafted tokens, is due to other programs.
    """
    name, fault = "needed_block_efficiency", ""
    timed = [row for row in rows if name in row.totals and not row.setting.get("engine")]
    costs = {gamma_of(row): row.totals[name] for row in timed}
    verifying = {gamma_of(row): row.totals.get("block_cost_ratio", math.inf) for row in timed}
    for gamma, cost in sorted(costs.items()):
        longer = [other for other in costs if other > gamma]
        least = min(cost, verifying[gamma])
        if least < _LEAST_BLOCK_COST:
            fault = f"a block of gamma {gamma} takes {least:.2f} of the time of a target pass"
            break
        cheapest = min(longer, key=costs.__getitem__, default=gamma)
        if cost > _MOST_REVERSAL * costs[cheapest]:
            times = f"{cost / costs[cheapest]:.1f} times as long as one of gamma {cheapest}"
            fault = f"a block of gamma {gamma} takes {times}"
            break
    return fault and f"timings were disturbed ({fault}): stop other programs and run again"


def gamma_of(row: Row) -> int:
    """Number of drafted tokens per block."""
    return int(row.setting["gamma"])


def value_of(row: Row, name: str) -> float | None:
    """A figure or a total of a row; None if it has neither."""
    figure = FIGURES.get(name)
    return figure.value(row) if figure and figure.is_in(row) else row.totals.get(name)


def num_tokens(row: Row) -> int:
    """Tokens of all units."""
    return int(sum(filter(None, row.sums["tokens"])))
