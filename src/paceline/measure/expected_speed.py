"""Expected speedups without timed requests, with intervals that allow for the choice of gamma.

GO needs one gamma above 1, so the error rate of a lower bound, 2.5%, is divided by the number of
gammas (Bonferroni). NO-GO needs all below 1, so an upper bound keeps its 2.5%. Either verdict is
wrong in at most 2.5% of measurements.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from paceline.core.bootstrap import Interval, product_interval, ratio_interval
from paceline.rng import named_generator

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from paceline.measure.engine_costs import EngineCosts
    from paceline.measure.latency import PassCosts
    from paceline.measure.results import GammaRow

    Errors = Callable[[int, float], tuple[float, float]]
    """Relative error of block / target pass as two factors, from gamma and confidence."""

_ERROR_RATE = 0.05


class ExpectedSpeed(NamedTuple):
    """Expected speedup of a gamma with its interval, and the two parts of its error.

    Attributes:
        row: The figures of this gamma.
        speedup: With the errors of the texts and of the costs together.
        by_texts: The speedup with the error of tau alone.
        by_costs: 1 with the relative error of the costs alone; unbounded if they have no interval.
    """

    row: GammaRow
    speedup: Interval
    by_texts: Interval
    by_costs: Interval


def confidence_of_low(num_gammas: int) -> float:
    """Confidence of the interval that has the lower bound of each gamma."""
    return 1 - _ERROR_RATE / num_gammas


def expected_speeds(
    rows: Sequence[GammaRow],
    counts: Sequence[tuple[Tensor, Tensor]],
    errors: Errors,
    *,
    seed: int,
    in_full: bool = False,
    num_resamples: int = 4000,
) -> list[ExpectedSpeed]:
    """The expected speedup of each gamma.

    Args:
        rows: One for each gamma that was tried.
        counts: Expected tokens and blocks of each text, [B] each, for each gamma.
        errors: Of the costs of a block.
        seed: Of the bootstrap over texts.
        in_full: The engine drafts gamma tokens per block, also at the end of a text.
        num_resamples: Of the bootstrap.
    """
    confidences = confidence_of_low(len(rows)), 1 - _ERROR_RATE
    found: list[ExpectedSpeed] = []
    for row, of_texts in zip(rows, counts, strict=True):
        speedups, costs = list[Interval](), list[Interval]()
        for confidence in confidences:
            rng = named_generator(seed, "expected speedup")
            tau = ratio_interval(
                *of_texts, rng=rng, confidence=confidence, num_resamples=num_resamples
            )
            scale = row.expected_speedup / tau.value
            speedups.append(Interval(row.expected_speedup, tau.low * scale, tau.high * scale))
            costs.append(_by_costs(row, errors(row.gamma, confidence), in_full=in_full))
        by_texts, by_costs = (
            Interval(wide.value, wide.low, other.high) for wide, other in (speedups, costs)
        )
        found.append(ExpectedSpeed(row, product_interval(by_texts, by_costs), by_texts, by_costs))
    return found


def _by_costs(row: GammaRow, error: tuple[float, float], *, in_full: bool) -> Interval:
    """1 / the relative cost of a block that drafts `drafted_per_block` tokens."""
    if not math.isfinite(error[1]):
        return Interval(1.0, 0.0, math.inf)
    part = 1.0 if in_full else row.drafted_per_block / row.gamma
    block = row.drafting_cost_ratio * row.gamma + row.block_cost_ratio
    cost = 1 + part * (block - 1)
    low_cost, high_cost = (cost + part * block * (factor - 1) for factor in error)
    return Interval(1.0, cost / high_cost, cost / low_cost if low_cost > 0 else math.inf)


def errors_of(passes: PassCosts, costs: EngineCosts | None, concurrency: int) -> Errors:
    """The errors of passes that were timed here, or of an engine's costs."""
    if costs is None:
        return passes.error_of_block
    return lambda gamma, confidence: costs.error_of_block(gamma, concurrency, confidence)
