"""First-order stochastic dominance of one sample of per-example figures over another.

Paper: Zhou et al. 2023, figures 3b and C.16, which show it by a plot. Here with intervals over
resamples of the examples, which both samples share.

The largest difference of two empirical functions is too large on average, and its resamples are so
twice. Its upper bound is a quantile of the resamples. Its lower bound is the difference less a
quantile of sup_x [resample - data], which is at least the error of the largest difference.
"""

# N units, R resamples, X points
from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from paceline.core.bootstrap import (
    LEAST_UNITS,
    Interval,
    percentile_interval,
    resample_counts,
)
from paceline.core.bounded_means import mean_bounds
from paceline.errors import UsageError
from paceline.rng import named_generator
from paceline.studies.evidence import column, select
from paceline.studies.rows import pooled

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from paceline.studies.claim_file import Dominance, Side
    from paceline.studies.rows import StudyRow

_NUM_RESAMPLES = 4000
_BEYOND = 5  # resamples beyond a bound, at least
_POINTS_AT_ONCE = 200


class DominanceEffect(NamedTuple):
    """Distances of two distribution functions.

    Attributes:
        against: sup_x [F_first(x) - F_second(x)]; 0 if first dominates.
        above: sup_x [F_second(x) - F_first(x)].
        gain: Mean of first - second, which is positive if first dominates and differs.
    """

    against: Interval
    above: Interval
    gain: Interval
    num_units: int


def dominance_effect(
    test: Dominance, rows: Sequence[StudyRow], tail: float
) -> DominanceEffect | None:
    """Both distances with intervals; None if a side has no rows or too few units.

    Raises:
        UsageError: a side matches several settings, or the sides have different examples.
    """
    sides = [own_figures(test, side, rows) for side in (test.first, test.second)]
    first, second = sides
    if first is None or second is None or len(first) < LEAST_UNITS:
        return None
    if first.keys() != second.keys():
        raise UsageError("the sides of a claim measure different examples; run the study again")
    values = [
        torch.tensor([side[unit] for unit in first], dtype=torch.float64)
        for side in (first, second)
    ]
    return distances(values[0], values[1], tail)


def distances(first_N: Tensor, second_N: Tensor, tail: float) -> DominanceEffect:
    """Largest differences of the two empirical distribution functions, with intervals. [N] each."""
    count = len(first_N)
    resamples = max(_NUM_RESAMPLES, math.ceil(_BEYOND / tail))
    weights_RN = resample_counts(count, resamples, named_generator(0, "dominance", count))
    weights_RN = torch.cat([torch.ones_like(weights_RN[:1]), weights_RN])
    points_X = torch.cat([first_N, second_N]).unique()
    against = [_Largest(), _Largest()]
    for some_X in points_X.split(_POINTS_AT_ONCE):
        below_NX = [(side_N[:, None] <= some_X).double() for side_N in (first_N, second_N)]
        gaps_RX = weights_RN @ (below_NX[0] - below_NX[1]) / count
        against[0].add(gaps_RX)
        against[1].add(-gaps_RX)
    gains_N = first_N - second_N
    mean = float(gains_N.mean())
    low, high = mean_bounds([gains_N], tail, named_generator(0, "gain", count), [None])
    return DominanceEffect(
        against[0].interval(tail),
        against[1].interval(tail),
        Interval(mean, mean + low, mean + high),
        count,
    )


class _Largest:
    """The largest gap over points, at least 0, of the data and then of each resample."""

    def __init__(self) -> None:
        self._gaps_R = self._errors_R = torch.tensor(0.0, dtype=torch.float64)

    def add(self, gaps_RX: Tensor) -> None:
        """Gaps at further points."""
        self._gaps_R = torch.maximum(self._gaps_R, gaps_RX.amax(-1))
        # outside of all points both functions are equal, so an error is at least 0
        self._errors_R = torch.maximum(self._errors_R, (gaps_RX[1:] - gaps_RX[0]).amax(-1))

    def interval(self, tail: float) -> Interval:
        """The gap of the data with its interval."""
        found = percentile_interval(self._gaps_R, tail)
        error = float(torch.quantile(self._errors_R, 1 - tail))
        return found._replace(low=max(0.0, found.value - error))


def own_figures(
    test: Dominance, side: Side, rows: Sequence[StudyRow]
) -> dict[tuple[str, int], float] | None:
    """Figures by population and unit."""
    chosen = select(rows, test.rows, side.where)
    if not chosen:
        return None
    if any(row.setting != chosen[0].setting for row in chosen):
        raise UsageError("a side of a dominance test matches several settings; name one in where")
    row = pooled(chosen)
    over_N = column(row, side.over or test.over)
    under = side.under or test.under
    values_N = over_N if under is None else over_N / column(row, under).clamp(min=1e-9)
    units = [(row.population, unit) for unit in row.units]
    return dict(zip(units, values_N.tolist(), strict=True))
