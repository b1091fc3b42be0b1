"""Decoding settings on one set of examples: figures, resamples, the best under a constraint.

The best of many cells looks better than it is on the examples that chose it. So a best cell is
chosen on a random half of the examples, and its figures are those of the other half.

Settings of cells that this module reads: `family`, the name of the cell's curve; `lossless`.
"""

# C cells, N examples, R resamples
from __future__ import annotations

import itertools
import math
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch

from paceline.core.bootstrap import Interval, resample_counts
from paceline.errors import UsageError
from paceline.results.figures import FIGURES
from paceline.rng import named_generator

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from paceline.core.bootstrap import Ratio
    from paceline.results.row import Row

NUM_RESAMPLES = 2000
TARGET_ALONE = "autoregressive"  # names of families
ORACLE = "oracle_cascade"
LOSSLESS = "yes"
"""Value of the setting `lossless` of cells that follow the target's distribution by proof."""
_UNKNOWN = Interval(math.nan, math.nan, math.nan)
_EXACTLY_1 = Interval(1.0, 1.0, 1.0)


def family_of(row: Row) -> str:
    """Name of the cell's curve in a frontier plot; empty for a row that is no cell."""
    return str(row.setting.get("family", ""))


def is_lossless(row: Row) -> bool:
    return row.setting.get("lossless") == LOSSLESS


def with_target_scores(row: Row, target: Row) -> Row:
    """The row with the target's score of each of its units, if both are scored."""
    if "score" not in row.sums or "score" not in target.sums:
        return row
    scores = dict(zip(target.units, target.sums["score"], strict=True))
    column = tuple(scores.get(unit) for unit in row.units)
    return row.model_copy(update={"sums": row.sums | {"target_score": column}})


def is_known(figure: str, row: Row) -> bool:
    """True if the figure of a cell is 1 by definition or by proof."""
    if family_of(row) == TARGET_ALONE:
        return figure in {"relative_quality", "speedup"}
    return figure == "relative_quality" and is_lossless(row)


def measure(figure: str, row: Row) -> Interval:
    """A figure of a cell that has the target's scores, with its interval; NaN if it is unknown."""
    if is_known(figure, row):
        return _EXACTLY_1
    chosen = FIGURES[figure]
    return chosen.measure(row) if chosen.is_in(row) else _UNKNOWN


class Reached(NamedTuple):
    """The fastest cell that has a quality on one half of the examples.

    Attributes:
        row: The cell.
        speedup: On the other half, with a 95% interval.
        quality: Divided by the target's, there.
    """

    row: Row
    speedup: Interval
    quality: Interval


class Frontier:
    """The finished cells of one sampling. Figures are those of `results.figures`, by name.

    The relative quality of the target alone and of lossless cells is exactly 1: they have the
    target's quality by proof, and above temperature 0 their mean score differs by chance. The
    speedup of the target alone is 1, too.

    Attributes:
        rows: The cells, [C].
        target: The cell of the target alone.
        num_examples: Number of examples per cell.
        num_timed: Number of examples on which speed is measured.
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        targets = [row for row in rows if family_of(row) == TARGET_ALONE]
        if not targets:
            raise UsageError("the target alone has no finished cell; run the bench to its end")
        self.rows = list(rows)
        self._places = {id(row): place for place, row in enumerate(self.rows)}
        self.target = targets[0]
        self.num_examples = len(self.target.units)
        self.num_timed = sum(v is not None for v in self.target.sums.get("target_seconds", ()))
        for row in rows:
            if set(row.units) != set(self.target.units):
                raise UsageError(
                    f"a cell has {len(row.units)} examples, the target alone "
                    f"{self.num_examples}, not the same; run the bench again in a new directory"
                )
        units = self.target.units
        self._whole = [with_target_scores(row, self.target).only(units) for row in rows]
        self._intervals: dict[tuple[str, int], Interval] = {}
        self._resamples: dict[tuple[str, int], Tensor] = {}

    def _place(self, row: Row) -> int:
        # to compare a row with many others takes longer than to compute its figures
        place = self._places.get(id(row))
        return self.rows.index(row) if place is None else place

    def measure(self, figure: str, row: Row) -> Interval:
        """A figure of a cell with its 95% interval over examples; NaN if it is unknown."""
        key = figure, self._place(row)
        if key not in self._intervals:
            self._intervals[key] = measure(figure, self._whole[key[1]])
        return self._intervals[key]

    def against_itself(self) -> Interval:
        """Speedup of the target alone, measured as a cell: 1 apart from noise."""
        speedup, whole = FIGURES["speedup"], self._whole[self._place(self.target)]
        return speedup.measure(whole) if speedup.is_in(whole) else _UNKNOWN

    def value(self, figure: str, row: Row) -> float:
        """A figure of a cell; NaN if it is unknown."""
        return float(self._weighted(figure, row, torch.ones(1, self.num_examples).double())[0])

    def resampled(self, figure: str, row: Row) -> Tensor:
        """A figure of a cell in the data and then in each resample, [1 + R].

        All cells have the same resamples: an example that is hard for one is hard for all.
        """
        key = figure, self._place(row)
        if key not in self._resamples:
            self._resamples[key] = self._weighted(figure, row, self._resample_weights)
        return self._resamples[key]

    def columns(self, figure: str, row: Row) -> list[Ratio]:
        """Numerators and denominators of the ratios whose product is the figure, [N] each."""
        return FIGURES[figure].columns(self._whole[self._place(row)])

    @cached_property
    def halves(self) -> tuple[Frontier, Frontier]:
        """The cells on a random half of the examples, which choose, and on the rest, which report.

        Timed examples are halved by themselves. A single example is in both.
        """
        if self.num_examples < 2:
            return self, self
        rng = named_generator(0, "halves", self.num_examples)
        order = torch.randperm(self.num_examples, generator=rng).tolist()
        seconds = self.target.sums.get("target_seconds", (None,) * self.num_examples)
        parts = [
            [place for place in order if (seconds[place] is not None) is timed]
            for timed in (True, False)
        ]

        def half(which: int) -> Frontier:
            halved = (part if len(part) == 1 else part[which::2] for part in parts)
            places = sorted(itertools.chain(*halved))
            units = [self.target.units[place] for place in places]
            return Frontier([row.only(units) for row in self.rows])

        return half(0), half(1)

    def fastest(self, cells: Sequence[Row], floor: float) -> Reached | None:
        """The highest speedup with at least `floor` of the target's quality; None if none."""
        figures = "speedup", "relative_quality"
        choosing, reporting = self.halves
        values: list[tuple[float, int]] = []
        for place in map(self._place, cells):
            speedup, quality = (choosing.value(name, choosing.rows[place]) for name in figures)
            if quality >= floor and math.isfinite(speedup):
                values.append((speedup, -place))
        if not values:
            return None
        place = -max(values)[1]
        row = reporting.rows[place]
        return Reached(self.rows[place], *(reporting.measure(name, row) for name in figures))

    def _weighted(self, figure: str, row: Row, weights_RN: Tensor) -> Tensor:
        """A figure for each row of numbers of times that the examples count, [R]."""
        found_R = torch.ones(len(weights_RN), dtype=torch.float64)
        if is_known(figure, row):
            return found_R
        assert FIGURES[figure].ratios, f"{figure} is no ratio of sums"
        if not FIGURES[figure].is_in(self._whole[self._place(row)]):
            return found_R * math.nan
        for over_N, under_N in self.columns(figure, row):
            found_R = found_R * (weights_RN @ over_N) / (weights_RN @ under_N)
        # without the rounding errors of sums, so that a quality of 0.95 reaches a floor of 0.95
        return found_R.round(decimals=12)

    @cached_property
    def _resample_weights(self) -> Tensor:
        """How often each example is in a resample; the first is the data itself."""
        weights_RN = resample_counts(self.num_examples, NUM_RESAMPLES).double()
        return torch.cat([torch.ones_like(weights_RN[:1]), weights_RN])
