"""Effects over drafts or examples as wholes: dominance of a distribution, correlation, theorems.

Dominance. Paper: Zhou et al. 2023, figures 3b and C.16, which show it by a plot. Here with
intervals over resamples of the examples, which both samples share. The largest difference of two
empirical functions is too large on average, and its resamples are so twice. Its upper bound is a
quantile of the resamples. Its lower bound is the difference less a quantile of
sup_x [resample - data], which is at least the error of the largest difference.

Correlation. Paper: Zhou et al. 2023, figures 3c and 5a, which show it by a plot. Figures are
measured on examples, and their errors would make a correlation of values too small (Spearman 1904)
or, as all drafts share the examples, too large. So the expected sums of squares and products of the
errors are subtracted first. A correlation of ranks is that of the figures as measured, which errors
can only lower on average. Intervals are over examples; the drafts are all there are.

Error rates in simulations are in tests/statistical/test_error_rate_of_claims.py.
"""

# N units, D drafts, R resamples, X points
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
from paceline.results.comparison import estimate
from paceline.results.figures import FIGURES
from paceline.results.row import pooled
from paceline.rng import named_generator
from paceline.studies.evidence import column, select

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from paceline.results.row import Row
    from paceline.studies.claim_file import Correlation, Dominance, Pointwise, Side, SumOf

_NUM_RESAMPLES = 4000
_BEYOND = 5  # resamples beyond a bound, at least
_RESAMPLES_AT_ONCE = 1000
_LEAST_DRAFTS = 4
_ROUNDING = 1e-9  # of figures that are equal by theory


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


def dominance_effect(test: Dominance, rows: Sequence[Row], tail: float) -> DominanceEffect | None:
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
    values_M, order_M = torch.cat([first_N, second_N]).sort(stable=True)
    units_M, signs_M = order_M % count, (order_M < count).double() * 2 - 1
    points_X = torch.cat([values_M[1:] > values_M[:-1], torch.ones(1, dtype=torch.bool)])

    def gaps(weights_RN: Tensor) -> Tensor:
        """F_first - F_second at each value of either sample, [R, X]."""
        return (weights_RN[:, units_M] * signs_M).cumsum(-1)[:, points_X] / count

    rng = named_generator(0, "dominance", count)
    data_X = gaps(torch.ones(1, count, dtype=torch.float64))[0]
    against, above = _Largest(data_X), _Largest(-data_X)
    for begun in range(0, resamples, _RESAMPLES_AT_ONCE):
        gaps_RX = gaps(resample_counts(count, min(_RESAMPLES_AT_ONCE, resamples - begun), rng))
        against.add(gaps_RX)
        above.add(-gaps_RX)
    gains_N = first_N - second_N
    mean = float(gains_N.mean())
    low, high = mean_bounds([gains_N], tail, named_generator(0, "gain", count), [None])
    return DominanceEffect(
        against.interval(tail),
        above.interval(tail),
        Interval(mean, mean + low, mean + high),
        count,
    )


class _Largest:
    """The largest gap over points, at least 0, of the data and of resamples."""

    def __init__(self, data_X: Tensor) -> None:
        self._data_X = data_X
        self._gaps = [data_X.amax()[None].clamp(min=0)]
        self._errors: list[Tensor] = []

    def add(self, gaps_RX: Tensor) -> None:
        """Gaps of further resamples; outside of all points both functions are equal."""
        self._gaps.append(gaps_RX.amax(-1).clamp(min=0))
        self._errors.append((gaps_RX - self._data_X).amax(-1).clamp(min=0))

    def interval(self, tail: float) -> Interval:
        """The gap of the data with its interval."""
        found = percentile_interval(torch.cat(self._gaps), tail)
        error = float(torch.quantile(torch.cat(self._errors), 1 - tail))
        return found._replace(low=max(0.0, found.value - error))


def own_figures(
    test: Dominance, side: Side, rows: Sequence[Row]
) -> dict[tuple[str, int], float] | None:
    """Figures by population and unit."""
    chosen = select(rows, test.rows, side.where)
    if not chosen:
        return None
    row = _pooled_setting(chosen)
    ((over_N, under_N),) = FIGURES[test.figure].columns(row)
    values_N = over_N / under_N.clamp(min=1e-9)
    units = [(row.population, unit) for unit in row.units]
    return dict(zip(units, values_N.tolist(), strict=True))


class CorrelationEffect(NamedTuple):
    """A correlation.

    Attributes:
        interval: Its value, with an interval over examples for these drafts.
        without_one: The smallest and the largest value if one draft is left out.
    """

    interval: Interval
    num_drafts: int
    num_units: int
    without_one: tuple[float, float]

    @property
    def note(self) -> str:
        """What the interval does not show."""
        low, high = self.without_one
        return (
            f"{self.num_drafts} drafts, seeds of training among them; without any one of them "
            f"{low:.2f} to {high:.2f}"
        )


def correlation_effect(
    test: Correlation, rows: Sequence[Row], tail: float
) -> CorrelationEffect | None:
    """The correlation of a test; None if there are too few rows or examples.

    `tail`: probability on either side of the interval.

    Raises:
        UsageError: the rows do not have a sum, or have different examples.
    """
    groups: dict[str, list[Row]] = {}
    for row in select(rows, test.rows):
        groups.setdefault(str(sorted(row.setting.items())), []).append(row)
    drafts = [pooled(group) for group in groups.values()]
    if len(drafts) < _LEAST_DRAFTS or len(drafts[0].units) < LEAST_UNITS:
        return None
    if any(
        (one.population, one.units) != (drafts[0].population, drafts[0].units) for one in drafts
    ):
        raise UsageError("the drafts of a claim have different examples; run the study again")
    others = [[*range(one), *range(one + 1, len(drafts))] for one in range(len(drafts))]
    if test.ranks:
        x_ND2, y_ND2 = (_columns(one, drafts) for one in (test.first, test.second))
        found = correlation_of_ranks(x_ND2, y_ND2, tail)
        sums = x_ND2.sum(0, keepdim=True), y_ND2.sum(0, keepdim=True)
        left = [float(_spearman(*(one[:, kept] for one in sums))) for kept in others]
    else:
        x_D, ex_ND, y_D, ey_ND = (
            part for one in (test.first, test.second) for part in _figures(one, drafts)
        )
        found = correlation(x_D, ex_ND, y_D, ey_ND, tail)
        left = [
            _without_errors(x_D[kept], ex_ND[:, kept], y_D[kept], ey_ND[:, kept])[0]
            for kept in others
        ]
    return CorrelationEffect(found, len(drafts), len(drafts[0].units), (min(left), max(left)))


def _figures(name: str, drafts: Sequence[Row]) -> tuple[Tensor, Tensor]:
    """-> the figure of each draft, [D], and the influence of each unit on them, [N, D]."""
    found = [estimate(FIGURES[name], row) for row in drafts]
    values_D = torch.tensor([one.value for one in found], dtype=torch.float64)
    return values_D, torch.stack([one.influence_N for one in found], dim=1)


def correlation(
    x_D: Tensor, x_influence_ND: Tensor, y_D: Tensor, y_influence_ND: Tensor, tail: float
) -> Interval:
    """The correlation of x and y without their errors, and its interval by the delta method.

    All of [-1, 1] if the values differ by no more than their errors.
    """
    count = len(x_influence_ND)
    value, xx, yy = _without_errors(x_D, x_influence_ND, y_D, y_influence_ND)
    if min(xx, yy) <= 0:
        return Interval(0.0, -1.0, 1.0)
    x_D, y_D = x_D - x_D.mean(), y_D - y_D.mean()
    ex_ND = x_influence_ND - x_influence_ND.mean(1, keepdim=True)
    ey_ND = y_influence_ND - y_influence_ND.mean(1, keepdim=True)
    influence_N = (ex_ND @ y_D + ey_ND @ x_D) / math.sqrt(xx * yy)
    influence_N -= value * (ex_ND @ x_D / xx + ey_ND @ y_D / yy)
    low, high = mean_bounds([influence_N], tail, named_generator(0, "correlation", count), [None])
    bounds = (value, value + low, value + high)
    return Interval(*(max(-1.0, min(1.0, one)) for one in bounds))


def _without_errors(
    x_D: Tensor, x_influence_ND: Tensor, y_D: Tensor, y_influence_ND: Tensor
) -> tuple[float, float, float]:
    """-> the correlation, 0 if unknown, and the squares of x and of y, less their errors."""
    count = len(x_influence_ND)

    def product(a_D: Tensor, b_D: Tensor, ea_ND: Tensor, eb_ND: Tensor) -> float:
        ea_ND, eb_ND = (one - one.mean(1, keepdim=True) for one in (ea_ND, eb_ND))
        errors = float((ea_ND * eb_ND).sum()) / (count - 1) / count
        return float((a_D - a_D.mean()) @ (b_D - b_D.mean())) - errors

    xx = product(x_D, x_D, x_influence_ND, x_influence_ND)
    yy = product(y_D, y_D, y_influence_ND, y_influence_ND)
    if min(xx, yy) <= 0:
        return 0.0, xx, yy
    return product(x_D, y_D, x_influence_ND, y_influence_ND) / math.sqrt(xx * yy), xx, yy


def _columns(name: str, drafts: Sequence[Row]) -> Tensor:
    """Numerators and denominators of each draft's figure, in the order of the units, [N, D, 2]."""
    places = {unit: place for place, unit in enumerate(drafts[0].units)}
    found: list[Tensor] = []
    for row in drafts:
        ((over_N, under_N),) = FIGURES[name].columns(row)
        order = torch.tensor([places[unit] for unit in row.units]).argsort()
        found.append(torch.stack([over_N, under_N], -1)[order])
    return torch.stack(found, 1)


def correlation_of_ranks(x_ND2: Tensor, y_ND2: Tensor, tail: float) -> Interval:
    """Spearman's correlation over drafts of two ratios of sums; interval over resampled examples.

    Resampling adds noise to the ranks, so the interval is shifted down: for a claim that the
    correlation is large, its error is below the nominal one.
    """
    count = len(x_ND2)
    resamples = max(_NUM_RESAMPLES, math.ceil(_BEYOND / tail))
    rng = named_generator(0, "ranks", count)
    found = [_spearman(*(sums_ND2.sum(0)[None] for sums_ND2 in (x_ND2, y_ND2)))]
    for begun in range(0, resamples, _RESAMPLES_AT_ONCE):
        weights_RN = resample_counts(count, min(_RESAMPLES_AT_ONCE, resamples - begun), rng)
        sums = (torch.einsum("rn,ndk->rdk", weights_RN, one) for one in (x_ND2, y_ND2))
        found.append(_spearman(*sums))
    interval = percentile_interval(torch.cat(found), tail)
    return Interval(
        interval.value, max(-1.0, min(interval[:2])), min(1.0, max(interval.value, interval.high))
    )


def _spearman(x_RD2: Tensor, y_RD2: Tensor) -> Tensor:
    """Correlation of the ranks of x[..., 0] / x[..., 1] and of y, [R]; ties in any order."""
    ranks = [
        (sums_RD2[..., 0] / sums_RD2[..., 1]).argsort(-1).argsort(-1).double()
        for sums_RD2 in (x_RD2, y_RD2)
    ]
    x_RD, y_RD = (one_RD - one_RD.mean(-1, keepdim=True) for one_RD in ranks)
    return (x_RD * y_RD).sum(-1) / (x_RD.square().sum(-1) * y_RD.square().sum(-1)).sqrt()


class Check(NamedTuple):
    """Result of a pointwise test.

    Attributes:
        violations: How often the theorem was not true.
        num_places: Number of units or positions where it was checked.
        first, second: Means of the sides; of violations and 0 if these were counted.
    """

    violations: int
    num_places: int
    first: float
    second: float


def check(test: Pointwise, rows: Sequence[Row]) -> Check | None:
    """Check a theorem at each unit; None if there are no rows.

    Raises:
        UsageError: a side matches several settings, or the sides have different examples.
    """
    if test.violations is not None and test.positions is not None:
        chosen = select(rows, test.rows)
        if not chosen:
            return None
        bad = sum(int(column(row, test.violations).sum()) for row in chosen)
        places = sum(int(column(row, test.positions).sum()) for row in chosen)
        return Check(bad, places, bad / places, 0.0)
    assert test.first is not None, "the file is checked"
    assert test.second is not None, "the file is checked"
    sides = [_sums(test, side, rows) for side in (test.first, test.second)]
    first, second = sides
    if not first or not second:
        return None
    if first.keys() != second.keys():
        raise UsageError("the sides of a claim measure different examples; run the study again")
    bad = 0
    for unit, values in first.items():
        gaps = [one - other for one, other in zip(values, second[unit], strict=True)]
        bad += any(abs(gap) > _ROUNDING if test.equal else gap < -_ROUNDING for gap in gaps)
    means = [sum(values[0] for values in side.values()) / len(side) for side in (first, second)]
    return Check(bad, len(first), means[0], means[1])


def _sums(
    test: Pointwise, side: SumOf, rows: Sequence[Row]
) -> dict[tuple[str, int], tuple[float, ...]]:
    """The compared sums by population and unit."""
    chosen = select(rows, test.rows, side.where)
    if not chosen:
        return {}
    row = _pooled_setting(chosen)
    names = test.over or (side.over or "",)
    columns = [column(row, name).tolist() for name in names]
    units = [(row.population, unit) for unit in row.units]
    return dict(zip(units, zip(*columns, strict=True), strict=True))


def _pooled_setting(chosen: Sequence[Row]) -> Row:
    if any(row.setting != chosen[0].setting for row in chosen):
        raise UsageError("a side of a claim matches several settings; name one in where")
    return pooled(chosen)
