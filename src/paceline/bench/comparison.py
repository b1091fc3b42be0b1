"""Comparison of two families of cells by one statistic, with the same number of cells from each.

A statistic is the least cost at a quality or the best quality at a cost; larger is better. The
cells are chosen on one half of the examples, and the statistic is measured on the other half, so
that a family does not gain from the luck of its best cell. Of the larger family, all choices of n
cells count equally, where n is the size of the smaller family: otherwise a finer grid is an
advantage.
"""

# C cells, F floors or levels, N examples
from __future__ import annotations

from math import comb
from typing import TYPE_CHECKING, NamedTuple

import torch

from paceline.bench.schema import ORACLE, TARGET_ALONE, family
from paceline.core.bootstrap import Interval
from paceline.core.bounded_means import mean_bounds
from paceline.rng import named_generator

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from paceline.bench.measured_frontier import Figure, Frontier
    from paceline.bench.schema import ResultRow

HIGH = 0.75
FLOORS = (1.0, 0.98, 0.95, 0.9)  # of quality / target's
_TAIL = 0.025


class Group(NamedTuple):
    """The families of cells whose names begin with the words of `name`."""

    name: str

    def cells(self, frontier: Frontier) -> list[ResultRow]:
        return [row for row in frontier.rows if self.has(family(row.decoding))]

    def has(self, name: str) -> bool:
        """True if the family is in the group: chow includes `chow confident`, not `chow_log`."""
        return f"{name} ".startswith(f"{self.name} ")


class Cost(NamedTuple):
    """A gain in cost, larger is better: `at_zero` + `sign` * a figure.

    Attributes:
        figure: The figure that it is made from.
        alone: Gain of the target alone.
        is_timed: True if measured on the timed examples only.
    """

    figure: Figure
    alone: float
    is_timed: bool
    at_zero: float = 0.0
    sign: float = 1.0

    def gain(self, figure: Tensor) -> Tensor:
        """The gain of each cell, in any shape; that of the target alone where it is unknown."""
        return (self.at_zero + self.sign * figure).nan_to_num(self.alone)

    def num_examples(self, frontier: Frontier) -> int:
        """Number of examples that the gain is measured on."""
        return frontier.num_timed if self.is_timed else frontier.num_examples


SPEEDUP = Cost("speedup", 1.0, is_timed=True)
CALLS_SAVED = Cost("deferral rate", 0.0, is_timed=False, at_zero=1.0, sign=-1.0)
ACCEPTED = Cost("rejection rate", 0.0, is_timed=False, at_zero=1.0, sign=-1.0)


class Choice(NamedTuple):
    """The cells that a statistic counts: `constant` + sum of weight * figure of a cell."""

    figure: Figure
    constant: float
    weights_C: Tensor

    def measured(self, frontier: Frontier) -> Estimate:
        """The sum on the examples of this frontier."""
        value, influence_N = self.constant, torch.zeros(frontier.num_examples).double()
        for weight, row in zip(self.weights_C.tolist(), frontier.rows, strict=True):
            if weight:
                value += weight * frontier.value(self.figure, row)
                influence_N = influence_N + weight * frontier.influence(self.figure, row)
        return Estimate(value, influence_N)


class Estimate(NamedTuple):
    """A value, and what each example adds to it, [N]."""

    value: float
    influence_N: Tensor

    def interval(self, tail: float) -> Interval:
        """The value with its interval."""
        rng = named_generator(0, "comparison", len(self.influence_N))
        low, high = mean_bounds([self.influence_N], tail, rng, [None])
        return Interval(self.value, self.value + low, self.value + high)


class AtQuality(NamedTuple):
    """For each floor: the largest gain of the cells with at least that quality / target's.

    If no cell of the family reaches the floor, the gain of the target alone.
    """

    name: str
    source: str
    cost: Cost
    floors: tuple[float, ...]

    def choices(self, frontier: Frontier, cells: Sequence[ResultRow], count: int) -> list[Choice]:
        """The expected best of `count` cells at each floor."""
        cost, at = self.cost, frontier.indices(cells)
        gain_C = cost.gain(_figures(frontier, cost.figure))
        quality_C = _figures(frontier, "relative quality")
        found: list[Choice] = []
        for floor in self.floors:
            counts_C = (quality_C >= floor) & (gain_C > cost.alone)
            weights_C, rest = _best_of(gain_C, counts_C, at, count)
            constant = rest * cost.alone + (1 - rest) * cost.at_zero
            found.append(Choice(cost.figure, constant, cost.sign * weights_C))
        return found


class QualityAt(NamedTuple):
    """The best quality / target's of the cells with at least a gain of `level`; 0 if there is none.

    `level` None: the upper quartile of the gains, without the target alone and oracles.
    """

    name: str
    source: str
    cost: Cost
    level: float | None

    def choices(self, frontier: Frontier, cells: Sequence[ResultRow], count: int) -> list[Choice]:
        """The expected best of `count` cells."""
        gain_C = self.cost.gain(_figures(frontier, self.cost.figure))
        quality_C = _figures(frontier, "relative quality").nan_to_num(0)
        counts_C = gain_C >= self.least_gain(frontier)
        weights_C, _ = _best_of(quality_C, counts_C, frontier.indices(cells), count)
        return [Choice("relative quality", 0.0, weights_C)]

    def least_gain(self, frontier: Frontier) -> float:
        """The least gain that counts."""
        if self.level is not None:
            return self.level
        left_out = [Group(TARGET_ALONE), Group(ORACLE)]
        at = [
            index
            for index, row in enumerate(frontier.rows)
            if not any(group.has(family(row.decoding)) for group in left_out)
        ]
        gain_C = self.cost.gain(_figures(frontier, self.cost.figure))
        return float(gain_C[at].quantile(HIGH))


Statistic = AtQuality | QualityAt

ACCEPTED_AT_QUALITY = AtQuality("acceptance rate", "", ACCEPTED, FLOORS)
CALLS_AT_QUALITY = AtQuality("target calls saved per token", "", CALLS_SAVED, FLOORS)
QUALITY_AT_FEW_CALLS = QualityAt("quality at few target calls", "", CALLS_SAVED, None)


class Side(NamedTuple):
    """Value of one family; `by_floor`: at each floor, if there are several."""

    name: str
    num_cells: int
    value: Interval
    by_floor: tuple[Interval, ...]


class Comparison(NamedTuple):
    """Two families compared by one statistic.

    Attributes:
        num_compared: Number of cells of each family that count.
        difference: First - second, with its 95% interval.
        strict: The same with the interval corrected for the number of comparisons (Bonferroni).
        is_untried: True if neither family reaches the condition.
    """

    first: Side
    second: Side
    num_compared: int
    difference: Interval
    strict: Interval
    is_untried: bool = False


def compare(
    frontier: Frontier,
    first: Group,
    second: Group,
    statistic: Statistic,
    num_comparisons: int,
    tail: float = _TAIL,
) -> Comparison | None:
    """First - second; None if one of them has no finished cell.

    `tail`: probability on either side of the intervals of differences.
    """
    groups = (first.cells(frontier), second.cells(frontier))
    count = min(map(len, groups))
    if count == 0:
        return None
    choosing, reporting = frontier.halves
    sides: list[Side] = []
    means: list[Estimate] = []
    untried = True
    for group, cells in zip((first, second), groups, strict=True):
        there = [choosing.rows[place] for place in frontier.indices(cells).tolist()]
        choices = statistic.choices(choosing, there, count)
        found = [choice.measured(reporting) for choice in choices]
        untried = untried and not any(bool(choice.weights_C.any()) for choice in choices)
        means.append(_mean(found))
        by_floor = tuple(one.interval(_TAIL) for one in found) if len(found) > 1 else ()
        sides.append(Side(group.name, len(cells), means[-1].interval(_TAIL), by_floor))
    difference = Estimate(
        means[0].value - means[1].value, means[0].influence_N - means[1].influence_N
    )
    strict = difference.interval(tail / num_comparisons)
    return Comparison(sides[0], sides[1], count, difference.interval(tail), strict, untried)


def _mean(estimates: Sequence[Estimate]) -> Estimate:
    count = len(estimates)
    influence_N = torch.stack([one.influence_N for one in estimates]).mean(0)
    return Estimate(sum(one.value for one in estimates) / count, influence_N)


def _figures(frontier: Frontier, figure: Figure) -> Tensor:
    """The figure of each cell on the data, [C]."""
    values = [frontier.value(figure, row) for row in frontier.rows]
    return torch.tensor(values, dtype=torch.float64)


def _best_of(values_C: Tensor, counts_C: Tensor, cells: Tensor, count: int) -> tuple[Tensor, float]:
    """How often each cell is the best one, over all choices of `count` of these cells.

    The i-th smallest value is the largest in comb(i - 1, count - 1) of the comb(C, count) choices.

    Args:
        values_C: Value of each cell.
        counts_C: Whether a cell is allowed to be the best one.
        cells: Places of the cells to choose from.
        count: Number of cells of a choice.

    Returns:
        The shares, [C], and the share of choices in which no cell is allowed.
    """
    order = sorted(cells.tolist(), key=lambda place: (bool(counts_C[place]), values_C[place]))
    total = comb(len(order), count)
    shares_C = torch.zeros_like(values_C)
    for below, place in enumerate(order):
        if counts_C[place]:
            shares_C[place] = comb(below, count - 1) / total
    return shares_C, 1 - float(shares_C.sum())
