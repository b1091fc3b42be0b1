"""Comparison of two families of cells by one statistic, with the same number of cells from each.

A statistic is the least cost at a quality or the best quality at a cost, in each resample of the
examples; larger is better. The best of many cells looks better by chance, so the larger family
counts with the expected best of n of its cells, where n is the size of the smaller family.
"""

# C cells, F floors or levels, R resamples
from __future__ import annotations

from math import comb
from typing import TYPE_CHECKING, NamedTuple

import torch

from paceline.bench.schema import ORACLE, TARGET_ALONE, family
from paceline.core.bootstrap import percentile_interval

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from paceline.bench.measured_frontier import Frontier
    from paceline.bench.schema import ResultRow
    from paceline.core.bootstrap import Interval

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
    """A gain in cost, larger is better.

    Attributes:
        gain: Gain of each cell in each resample, [C, 1 + R].
        alone: Gain of the target alone.
        is_timed: True if measured on the timed examples only.
    """

    gain: Callable[[Frontier], Tensor]
    alone: float
    is_timed: bool

    def num_examples(self, frontier: Frontier) -> int:
        """Number of examples that the gain is measured on."""
        return frontier.num_timed if self.is_timed else frontier.num_examples


SPEEDUP = Cost(lambda frontier: frontier.speed_CR, 1.0, is_timed=True)
CALLS_SAVED = Cost(lambda frontier: 1 - frontier.deferral_rates, 0.0, is_timed=False)
ACCEPTED = Cost(lambda frontier: 1 - frontier.rejection_rates, 0.0, is_timed=False)


class AtQuality(NamedTuple):
    """For each floor: the largest gain of the cells with at least that quality / target's.

    If no cell of the family reaches the floor, the gain of the target alone.
    """

    name: str
    source: str
    cost: Cost
    floors: tuple[float, ...]

    def values(self, frontier: Frontier, cells: Sequence[ResultRow], count: int) -> Tensor:
        """The expected best of `count` cells, [F, 1 + R]."""
        at = frontier.indices(cells)
        gain_CR = self.cost.gain(frontier)[at].nan_to_num(self.cost.alone)
        gain_CR = gain_CR.clamp(min=self.cost.alone)
        return torch.stack(
            [
                best_of(gain_CR.where(frontier.granted_CR[at] >= floor, self.cost.alone), count)
                for floor in self.floors
            ]
        )


class QualityAt(NamedTuple):
    """The best quality / target's of the cells with at least a gain of `level`; 0 if there is none.

    `level` None: the upper quartile of the gains, without the target alone and oracles.
    """

    name: str
    source: str
    cost: Cost
    level: float | None

    def values(self, frontier: Frontier, cells: Sequence[ResultRow], count: int) -> Tensor:
        """The expected best of `count` cells, [1, 1 + R]."""
        at = frontier.indices(cells)
        reached_CR = self.cost.gain(frontier)[at] >= self.least_gain(frontier)
        return best_of(frontier.relative_CR[at].where(reached_CR, 0.0), count)[None]

    def least_gain(self, frontier: Frontier) -> Tensor:
        """The least gain in each resample, [1 + R]."""
        gain_CR = self.cost.gain(frontier)
        if self.level is not None:
            return torch.full_like(gain_CR[0], self.level)
        left_out = [Group(TARGET_ALONE), Group(ORACLE)]
        at = [
            index
            for index, row in enumerate(frontier.rows)
            if not any(group.has(family(row.decoding)) for group in left_out)
        ]
        return gain_CR[at].nan_to_num(self.cost.alone).quantile(HIGH, dim=0)


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
    """

    first: Side
    second: Side
    num_compared: int
    difference: Interval
    strict: Interval

    @property
    def is_untried(self) -> bool:
        """True if the interval is [0, 0]: neither family reaches the condition."""
        return self.difference.low == self.difference.high == 0


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
    values = [statistic.values(frontier, cells, count) for cells in groups]
    sides = [
        Side(
            group.name,
            len(cells),
            percentile_interval(values_FR.mean(0)),
            tuple(map(percentile_interval, values_FR)) if len(values_FR) > 1 else (),
        )
        for group, cells, values_FR in zip((first, second), groups, values, strict=True)
    ]
    difference_R = values[0].mean(0) - values[1].mean(0)
    strict = percentile_interval(difference_R, tail / num_comparisons)
    return Comparison(sides[0], sides[1], count, percentile_interval(difference_R, tail), strict)


def best_of(values_CR: Tensor, count: int) -> Tensor:
    """Mean of the largest value over all choices of `count` of the C rows. [C, R] -> [R].

    The i-th smallest value is the largest in comb(i - 1, count - 1) of the comb(C, count) choices.
    """
    total = comb(len(values_CR), count)
    weights = [comb(below, count - 1) / total for below in range(len(values_CR))]
    weights_C1 = torch.tensor(weights, dtype=values_CR.dtype)[:, None]
    return (values_CR.sort(dim=0).values * weights_C1).sum(0)
