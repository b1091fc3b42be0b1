"""Comparison of two rows by one figure, such as two drafts on the same texts."""

# N units
from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from paceline.core.bootstrap import Interval
from paceline.core.bounded_means import mean_bounds
from paceline.errors import UsageError
from paceline.results.figures import FIGURES
from paceline.rng import named_generator

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.results.figures import Figure
    from paceline.results.row import Row

_STEP = 1e-4  # relative, of slopes of formulas


def paired_difference(
    figure: Figure, first: Row, second: Row, *, seed: int = 0, confidence: float = 0.95
) -> Interval:
    """A figure of `first` - that of `second`, on the units that both measured.

    What makes a unit hard for both cancels. The interval is that of the bootstrap over units, whose
    influence values are the differences of those of the figures; that of one unit is unbounded.
    Totals of the rows, such as the costs of passes, count as exact.

    Raises:
        UsageError: The rows share no units, or lack what the figure is made from.
    """
    first, second = figure.measured(first), figure.measured(second)
    shared = [unit for unit in first.units if unit in set(second.units)]
    if first.population != second.population or not shared:
        raise UsageError(
            f"{figure.words} is compared on {first.population} and on {second.population}, which "
            "share no units; measure both on the same"
        )
    one, two = (_estimate(figure, row.only(shared)) for row in (first, second))
    value = one.value - two.value
    if len(shared) == 1:
        return Interval(value, -math.inf, math.inf)
    rng = named_generator(seed, f"difference of {figure.name}")
    influence_N = one.influence_N - two.influence_N
    low, high = mean_bounds(influence_N, (1 - confidence) / 2, rng)
    return Interval(value, value + low, value + high)


class _Estimate(NamedTuple):
    """A value, and the influence of each unit on it, [N]: what it contributes, less the mean."""

    value: float
    influence_N: Tensor


def _estimate(figure: Figure, row: Row) -> _Estimate:
    """A figure of a row that has all its sums, with the influence of each unit.

    Raises:
        UsageError: the row lacks what the figure is made from, or a denominator is 0.
    """
    if figure.formula is not None:
        base = _estimate(FIGURES[figure.of], row)
        step = _STEP * (abs(base.value) or 1.0)
        value, high, low = (
            figure.of_base(row, one) for one in (base.value, base.value + step, base.value - step)
        )
        return _Estimate(value, (high - low) / (2 * step) * base.influence_N)
    if not figure.ratios:
        raise UsageError(f"{figure.words} is a total and no ratio; compare a ratio of sums")
    value, relative_N = 1.0, torch.zeros(len(row.units), dtype=torch.float64)
    for over_N, under_N in figure.columns(row):
        if float(under_N.sum()) == 0:
            raise UsageError(f"{figure.words} of {row.setting} has a denominator of 0 in all units")
        ratio = float(over_N.sum() / under_N.sum())
        value *= ratio
        relative_N += (over_N - ratio * under_N) / under_N.mean() / (ratio or 1.0)
    return _Estimate(value, (value or 1.0) * relative_N)
