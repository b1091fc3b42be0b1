"""Comparison of two families of cells by one statistic, or by their curves.

`compare`: a statistic is the least cost at a quality or the best quality at a cost; larger is
better. The cells are chosen on one half of the examples, and the statistic is measured on the other
half, so that a family does not gain from the luck of its best cell; then the halves change places,
and the mean of both counts. Both halves are resampled, each by itself, so the interval includes
that another sample would choose other cells.

`compare_curves`: a family is a curve of quality against cost, linear between its cells. The effect
is the mean difference of two curves over the costs that both reach, as a reader sees which curve of
a plot is above. It changes little when a quality does, so that it needs fewer examples than the
least cost at a floor of quality, which jumps from one cell to another.

`paired_difference`: two rows by one figure, such as two drafts on the same texts.
"""

# C cells, N units, P points, R resamples
from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from paceline.core.bootstrap import Interval, percentile_interval
from paceline.core.bounded_means import mean_bounds
from paceline.errors import UsageError
from paceline.results.figures import FIGURES
from paceline.results.frontier import ORACLE, TARGET_ALONE, family_of, is_lossless
from paceline.rng import named_generator

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from paceline.results.figures import Figure
    from paceline.results.frontier import Frontier
    from paceline.results.row import Row

HIGH = 0.75
_NUM_POINTS = 32
_TINY = 1e-12
_STEP = 1e-4  # relative, of slopes of formulas


class Group(NamedTuple):
    """The families of cells whose names begin with the words of `name`."""

    name: str

    def cells(self, frontier: Frontier) -> list[Row]:
        return [row for row in frontier.rows if self.has(family_of(row))]

    def has(self, name: str) -> bool:
        """True if the family is in the group: chow includes `chow confident`, not `chow_log`."""
        return f"{name} ".startswith(f"{self.name} ")


class Cost(NamedTuple):
    """A gain in cost, larger is better.

    Attributes:
        figure: Name of the figure that it is made from.
        is_saving: True if the gain is 1 - the figure.
        alone: Gain of the target alone.
        is_timed: True if measured on the timed examples only.
    """

    figure: str
    is_saving: bool
    alone: float
    is_timed: bool

    def gain(self, frontier: Frontier, cells: Sequence[Row]) -> Tensor:
        """Gain of each cell in each resample, that of the target alone if unknown, [C, 1 + R]."""
        figure_CR = torch.stack([frontier.resampled(self.figure, row) for row in cells])
        gain_CR = 1 - figure_CR if self.is_saving else figure_CR
        return gain_CR.nan_to_num(self.alone, torch.inf, -torch.inf)

    def num_examples(self, frontier: Frontier) -> int:
        """Number of examples that the gain is measured on."""
        return frontier.num_timed if self.is_timed else frontier.num_examples


# token_v3 is not among them: with alpha 0 it keeps the target's likeliest token, so it sharpens
_LOSSLESS_AT_AN_END = [
    Group(name)
    for name in (
        *("lossy beta 1.0", "lossy beta tuned", "lenient", "bild", "token_v1", "token_v2"),
        *("chow", "chow_log", "diff", "diff_log", "opt", "opt_log"),
        *("token_cascade", "sequence_cascade", "big_little"),
    )
]
"""Families that follow the target's distribution by proof at one end of their threshold.

Lossy decoding with alpha 0 is lossless; a cascade that always defers is the target.
"""

SPEEDUP = Cost("speedup", is_saving=False, alone=1.0, is_timed=True)
CALLS_SAVED = Cost("deferral_rate", is_saving=True, alone=0.0, is_timed=False)
ACCEPTED = Cost("rejection_rate", is_saving=True, alone=0.0, is_timed=False)


class AtQuality(NamedTuple):
    """The largest gain of the cells with at least a quality / target's of `floor`.

    Lossless speculative decoding with the same gamma is one of them: it has the target's quality,
    and who serves a rule may always choose it. Families without a gamma, such as sequential
    cascades, have the target alone.
    """

    cost: Cost
    floor: float

    def values(self, frontier: Frontier, places: Sequence[int]) -> Tensor:
        """The best of the cells at these places, [1 + R]."""
        lossless = _lossless_beside(frontier, places)
        halves = [_Half.of(half, [*places, *lossless], self.cost) for half in frontier.halves]

        def best(choosing: _Half, reporting: _Half) -> Tensor:
            counts_CR = (choosing.quality_CR >= self.floor) & (choosing.gain_CR > self.cost.alone)
            gain_CR = choosing.gain_CR.where(counts_CR, -torch.inf)
            return best_of(gain_CR, reporting.gain_CR.where(counts_CR, self.cost.alone))

        return torch.stack([best(*halves), best(*halves[::-1])]).mean(0)


class QualityAt(NamedTuple):
    """The best quality / target's of the cells with at least a gain of `level`; 0 if there is none.

    Lossless decoding with the same gamma is a setting of the families that have it as an end of
    their threshold, whatever thresholds were run; the target alone is one of sequential cascades.

    `level` None: the upper quartile of the gains, without the target alone and oracles.
    """

    cost: Cost
    level: float | None

    def values(self, frontier: Frontier, places: Sequence[int]) -> Tensor:
        """The best of the cells at these places, [1 + R]."""
        places = [*places, *_ends_of(frontier, places)]
        halves = [_Half.of(half, places, self.cost) for half in frontier.halves]

        def best(which: int) -> Tensor:
            choosing, reporting = halves[which], halves[1 - which]
            counts_CR = choosing.gain_CR >= self.least_gain(frontier, which)
            ranks_CR = choosing.quality_CR.where(counts_CR, -torch.inf)
            return best_of(ranks_CR, reporting.quality_CR.where(counts_CR, 0.0))

        return torch.stack([best(0), best(1)]).mean(0)

    def least_gain(self, frontier: Frontier, which: int = 0) -> Tensor:
        """The least gain in each resample of a choosing half, the first or the second, [1 + R]."""
        choosing = frontier.halves[which]
        left_out = [Group(TARGET_ALONE), Group(ORACLE)]
        rows = [
            row for row in choosing.rows if not any(group.has(family_of(row)) for group in left_out)
        ]
        gain_CR = self.cost.gain(choosing, rows)
        if self.level is not None:
            return torch.full_like(gain_CR[0], self.level)
        return gain_CR.quantile(HIGH, dim=0)


class Width(NamedTuple):
    """The range of the gains of a family whose settings were chosen before, on all examples."""

    cost: Cost

    def values(self, frontier: Frontier, places: Sequence[int]) -> Tensor:
        """The largest gain less the smallest, [1 + R]."""
        gain_CR = self.cost.gain(frontier, [frontier.rows[place] for place in places])
        return gain_CR.amax(0) - gain_CR.amin(0)


class _Half(NamedTuple):
    """Figures of some cells on one half of the examples, [C, 1 + R] each.

    A quality is infinite in a resample where the target scores 0: intervals leave it out.
    """

    gain_CR: Tensor
    quality_CR: Tensor

    @classmethod
    def of(cls, half: Frontier, places: Sequence[int], cost: Cost) -> _Half:
        rows = [half.rows[place] for place in places]
        qualities = [half.resampled("relative_quality", row) for row in rows]
        return cls(cost.gain(half, rows), torch.stack(qualities).nan_to_num(0, torch.inf))


Statistic = AtQuality | QualityAt | Width


def _lossless_beside(frontier: Frontier, places: Sequence[int]) -> list[int]:
    """The lossless speculative cells with the gamma of the cells at these places."""
    gammas = {frontier.rows[place].setting.get("gamma") for place in places} - {None}
    return [
        place
        for place, row in enumerate(frontier.rows)
        if is_lossless(row) and row.setting.get("gamma") in gammas and place not in places
    ]


def _ends_of(frontier: Frontier, places: Sequence[int]) -> list[int]:
    """The cells that are an end of the threshold of the families at these places, by proof."""
    ending = [
        place
        for place in places
        if any(group.has(family_of(frontier.rows[place])) for group in _LOSSLESS_AT_AN_END)
    ]
    is_sequential = any("gamma" not in frontier.rows[place].setting for place in ending)
    alone = frontier.places([frontier.target]) if is_sequential else []
    return _lossless_beside(frontier, ending) + alone


class Comparison(NamedTuple):
    """Two families compared by one statistic.

    Attributes:
        first: Value of the first family.
        second: Value of the second family.
        difference_R: First - second in the data and then in each resample.
        overlap: Of curves: the costs that both reach as a part of the longer one.
    """

    first: float
    second: float
    difference_R: Tensor
    overlap: float = 1.0

    def difference(self, tail: float = 0.025) -> Interval:
        """First - second; `tail`: probability on either side of the interval."""
        return percentile_interval(self.difference_R, tail)

    @property
    def is_untried(self) -> bool:
        """True if the 95% interval is [0, 0]: neither family reaches the condition."""
        difference = self.difference()
        return difference.low == difference.high == 0


def compare(
    frontier: Frontier,
    first: Group,
    second: Group,
    statistic: Statistic,
    other: Frontier | None = None,
) -> Comparison | None:
    """First - second; None if one of them has no finished cell.

    `other`: the cells of the second family, on the same examples; None: those of `frontier`.
    """
    frontiers = frontier, frontier if other is None else other
    groups = [
        one.places(group.cells(one)) for one, group in zip(frontiers, (first, second), strict=True)
    ]
    if not all(groups):
        return None
    if isinstance(statistic, Width) and len(groups[0]) != len(groups[1]):
        raise UsageError("a width needs the same settings on both sides; name them in rows")
    values = [statistic.values(one, places) for one, places in zip(frontiers, groups, strict=True)]
    return Comparison(float(values[0][0]), float(values[1][0]), values[0] - values[1])


def best_of(ranks_CR: Tensor, values_CR: Tensor) -> Tensor:
    """The value of the cell with the highest rank. [C, R] each -> [R]."""
    return values_CR.gather(0, ranks_CR.argmax(dim=0, keepdim=True))[0]


def compare_curves(
    frontier: Frontier,
    first: Group,
    second: Group,
    cost: Cost,
    other: Frontier | None = None,
) -> Comparison | None:
    """Mean quality / target's of first - that of second, over the gains that both reach.

    Args:
        frontier: The cells.
        first: One family.
        second: The other.
        cost: The gain in cost.
        other: The cells of the second family, on the same examples; None: those of `frontier`.

    Returns:
        None if one of them has no cell, or no gain is reached by both.
    """
    frontiers = frontier, frontier if other is None else other
    groups = (first.cells(frontiers[0]), second.cells(frontiers[1]))
    if not all(groups):
        return None

    gains = [cost.gain(one, cells) for one, cells in zip(frontiers, groups, strict=True)]
    qualities = [
        torch.stack([one.resampled("relative_quality", row) for row in cells])
        for one, cells in zip(frontiers, groups, strict=True)
    ]
    low_R = torch.stack([gain_CR.amin(0) for gain_CR in gains]).amax(0)
    high_R = torch.stack([gain_CR.amax(0) for gain_CR in gains]).amin(0)
    if low_R[0] > high_R[0]:
        return None
    shares_P1 = (torch.arange(_NUM_POINTS, dtype=low_R.dtype)[:, None] + 0.5) / _NUM_POINTS
    points_PR = low_R + shares_P1 * (high_R - low_R)
    means = [
        along(gain_CR, quality_CR, points_PR).mean(0)
        for gain_CR, quality_CR in zip(gains, qualities, strict=True)
    ]
    whole = max(float(gain_CR[:, 0].amax() - gain_CR[:, 0].amin()) for gain_CR in gains)
    overlap = float(high_R[0] - low_R[0]) / whole if whole else 1.0
    return Comparison(float(means[0][0]), float(means[1][0]), means[0] - means[1], overlap)


def along(gain_CR: Tensor, quality_CR: Tensor, points_PR: Tensor) -> Tensor:
    """Qualities at these gains: linear between the cells, constant beyond them. -> [P, R]."""
    gain_CR, order_CR = gain_CR.sort(0)
    quality_CR = quality_CR.gather(0, order_CR)
    found_PR = quality_CR[0].expand_as(points_PR)
    for left in range(len(gain_CR) - 1):
        step_R = (gain_CR[left + 1] - gain_CR[left]).clamp(min=_TINY)
        share_PR = ((points_PR - gain_CR[left]) / step_R).clamp(0, 1)
        found_PR = found_PR + share_PR * (quality_CR[left + 1] - quality_CR[left])
    return found_PR


class Estimate(NamedTuple):
    """A value, and the influence of each unit on it, [N].

    Attributes:
        value: Mean of what the units contribute.
        influence_N: What each one contributes, less the mean.
        largest: The largest contribution of a unit.
        bounds: The least and the largest possible contribution; None if they are not known.
    """

    value: float
    influence_N: Tensor
    largest: float
    bounds: tuple[float, float] | None = None


def estimate(figure: Figure, row: Row) -> Estimate:
    """A figure of a row that has all its sums, with the influence of each unit.

    Raises:
        UsageError: the row lacks what the figure is made from, or a denominator is 0.
    """
    if figure.formula is not None:
        base = estimate(FIGURES[figure.of], row)
        step = _STEP * (abs(base.value) or 1.0)
        value, high, low = (
            figure.of_base(row, one) for one in (base.value, base.value + step, base.value - step)
        )
        slope = (high - low) / (2 * step)
        return Estimate(value, slope * base.influence_N, abs(slope) * base.largest)
    if not figure.ratios:
        raise UsageError(f"{figure.words} is a total and no ratio; compare a ratio of sums")
    value, relative_N, largest = 1.0, torch.zeros(len(row.units), dtype=torch.float64), 0.0
    for over_N, under_N in figure.columns(row):
        if float(under_N.sum()) == 0:
            raise UsageError(f"{figure.words} of {row.setting} has a denominator of 0 in all units")
        ratio, mean = float(over_N.sum() / under_N.sum()), under_N.mean()
        value *= ratio
        relative_N += (over_N - ratio * under_N) / mean / (ratio or 1.0)
        largest = max(largest, float((over_N / mean).abs().max()) / (ratio or 1.0))
    bounds = (0.0, 1.0) if figure.is_score(row) else None
    return Estimate(value, (value or 1.0) * relative_N, (value or 1.0) * largest, bounds)


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
    one, two = (estimate(figure, row.only(shared)) for row in (first, second))
    value = one.value - two.value
    if len(shared) == 1:
        return Interval(value, -math.inf, math.inf)
    rng = named_generator(seed, f"difference of {figure.name}")
    influence_N = one.influence_N - two.influence_N
    low, high = mean_bounds([influence_N], (1 - confidence) / 2, rng, [None])
    return Interval(value, value + low, value + high)
