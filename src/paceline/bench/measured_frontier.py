"""Computes figures with intervals from result rows, and the best cell under a constraint.

The best of many cells looks better than it is on the examples that chose it. So a best cell is
chosen on a random half of the examples, and its figures are those of the other half.
"""

# C cells, N examples, R resamples
from __future__ import annotations

import math
from functools import cached_property
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

from paceline.bench.schema import ExampleRow, ResultRow, family
from paceline.core.bootstrap import (
    Interval,
    Ratios,
    ratio_interval,
    ratio_of_ratios_interval,
    resample_counts,
)
from paceline.core.bounded_means import bounded_mean_interval, bounded_ratio_interval
from paceline.core.rules import Lossless
from paceline.decode.strategies import Autoregressive, Speculative
from paceline.errors import UsageError
from paceline.rng import named_generator

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

NUM_RESAMPLES = 2000

Figure = Literal[
    "quality",
    "relative quality",
    "speedup",
    "decoding speedup",
    "rejection rate",
    "deferral rate",
]
_UNKNOWN = Interval(math.nan, math.nan, math.nan)
_EXACTLY_1 = Interval(1.0, 1.0, 1.0)


class Reached(NamedTuple):
    """The best cell that meets a constraint on one half of the examples.

    Attributes:
        row: The cell.
        value: Its figure on the other half, with a 95% interval.
        bound: The constrained figure there.
    """

    row: ResultRow
    value: Interval
    bound: Interval


class Frontier:
    """The finished cells of one temperature.

    Attributes:
        rows: The cells, [C].
        target: The cell of the target alone.
        num_examples: Number of examples per cell.
        num_timed: Number of examples on which speed is measured.
    """

    def __init__(
        self, rows: Sequence[ResultRow], seed: int = 0, num_resamples: int = NUM_RESAMPLES
    ) -> None:
        targets = [row for row in rows if isinstance(row.decoding.strategy, Autoregressive)]
        if not targets:
            raise UsageError("the target alone has no finished cell; run the bench to its end")
        self.rows = list(rows)
        self.target = targets[0]
        self.num_timed = sum(example.baseline is not None for example in self.target.examples)
        self.num_examples = len(self.target.examples)
        for row in rows:
            if len(row.examples) != self.num_examples:
                raise UsageError(
                    f"a cell has {len(row.examples)} examples, the target alone "
                    f"{self.num_examples}; run the bench again in a new output directory"
                )
        self._seed = seed
        self._num_resamples = num_resamples
        self._intervals: dict[tuple[Figure, int], Interval] = {}
        self._resamples: dict[tuple[Figure, int], Tensor] = {}

    def indices(self, cells: Sequence[ResultRow]) -> Tensor:
        """Their places in the first axis, [cells]."""
        return torch.tensor([self.rows.index(row) for row in cells])

    def quality(self, row: ResultRow) -> Interval:
        """Mean score; NaN if the task has no metric."""
        return self._interval("quality", row)

    def relative_quality(self, row: ResultRow) -> Interval:
        """Mean score / that of the target alone, on the same examples.

        Exactly 1 for the target alone and for lossless cells, which have the target's quality by
        proof: above temperature 0, their mean score differs by chance.
        """
        return self._interval("relative quality", row)

    def speedup(self, row: ResultRow) -> Interval:
        """Seconds per token of the target alone / of this cell, for whole requests."""
        return self._interval("speedup", row)

    def against_itself(self) -> Interval:
        """Speedup of the target alone, measured as a cell: 1 apart from noise."""
        return self._measured("speedup", self.target)

    def decoding_speedup(self, row: ResultRow) -> Interval:
        """Speedup after the first token, or after the first block if that contains it."""
        return self._interval("decoding speedup", row)

    def rejection_rate(self, row: ResultRow) -> Interval:
        """Rejected / examined drafted tokens; NaN if none are examined."""
        return self._interval("rejection rate", row)

    def deferral_rate(self, row: ResultRow) -> Interval:
        """Target calls / tokens, without the prefill and its tokens."""
        return self._interval("deferral rate", row)

    def value(self, figure: Figure, row: ResultRow) -> float:
        """A figure of a cell; NaN if it is unknown."""
        return float(self._weighted(figure, row, torch.ones(1, self.num_examples).double())[0])

    def resampled(self, figure: Figure, row: ResultRow) -> Tensor:
        """A figure of a cell in the data and then in each resample, [1 + R].

        All cells have the same resamples: an example that is hard for one is hard for all.
        """
        key = figure, self.rows.index(row)
        if key not in self._resamples:
            self._resamples[key] = self._weighted(figure, row, self._resample_weights)
        return self._resamples[key]

    def _weighted(self, figure: Figure, row: ResultRow, weights_RN: Tensor) -> Tensor:
        """A figure for each row of numbers of times that the examples count, [R]."""
        found_R = torch.ones(len(weights_RN), dtype=torch.float64)
        if self._is_known(figure, row):
            return found_R
        for over_N, under_N in self.ratios(figure, row):
            found_R = found_R * (weights_RN @ over_N) / (weights_RN @ under_N)
        # without the rounding errors of sums, so that a quality of 0.95 reaches a floor of 0.95
        return found_R.round(decimals=12)

    @cached_property
    def halves(self) -> tuple[Frontier, Frontier]:
        """The cells on a random half of the examples, which choose, and on the rest, which report.

        Timed examples are halved by themselves. A single example is in both.
        """
        if self.num_examples < 2:
            return self, self
        rng = named_generator(self._seed, "halves", self.num_examples)
        order = torch.randperm(self.num_examples, generator=rng).tolist()
        is_timed = [answer.baseline is not None for answer in self.target.examples]
        parts = [[place for place in order if is_timed[place] is each] for each in (True, False)]

        def half(which: int) -> Frontier:
            places = sorted(place for part in parts for place in part[which::2])
            rows = [
                row.model_copy(update={"examples": tuple(row.examples[place] for place in places)})
                for row in self.rows
            ]
            return Frontier(rows, self._seed + which, self._num_resamples)

        return half(0), half(1)

    def fastest(self, cells: Sequence[ResultRow], floor: float) -> Reached | None:
        """The highest speedup with at least `floor` of the target's quality; None if none."""
        return self._best(cells, "speedup", "relative quality", floor)

    def finest(self, cells: Sequence[ResultRow], speedup: float = 1.0) -> Reached | None:
        """The highest quality relative to the target's, at this speedup or more; None if none."""
        return self._best(cells, "relative quality", "speedup", speedup)

    def families(self) -> dict[str, list[ResultRow]]:
        """The cells of each curve of a frontier plot."""
        cells: dict[str, list[ResultRow]] = {}
        for row in self.rows:
            cells.setdefault(family(row.decoding), []).append(row)
        return cells

    def _best(
        self, cells: Sequence[ResultRow], figure: Figure, bounded: Figure, floor: float
    ) -> Reached | None:
        choosing, reporting = self.halves
        values: list[tuple[float, int]] = []
        for place in self.indices(cells).tolist():
            row = choosing.rows[place]
            value, bound = choosing.value(figure, row), choosing.value(bounded, row)
            if bound >= floor and math.isfinite(value):
                values.append((value, -place))
        if not values:
            return None
        place = -max(values)[1]
        row = reporting.rows[place]
        intervals = reporting._interval(figure, row), reporting._interval(bounded, row)
        return Reached(self.rows[place], *intervals)

    def _is_known(self, figure: Figure, row: ResultRow) -> bool:
        """True if the figure is 1 by definition or by proof."""
        if row is self.target:
            return figure in {"relative quality", "speedup"}
        return figure == "relative quality" and is_lossless(row)

    @cached_property
    def _resample_weights(self) -> Tensor:
        """How often each example is in a resample; the first is the data itself."""
        rng = named_generator(self._seed, "frontier", self.num_examples)
        weights_RN = resample_counts(self.num_examples, self._num_resamples, rng)
        return torch.cat([torch.ones_like(weights_RN[:1]), weights_RN])

    def _interval(self, figure: Figure, row: ResultRow) -> Interval:
        key = figure, self.rows.index(row)
        if key not in self._intervals:
            known = self._is_known(figure, row)
            self._intervals[key] = _EXACTLY_1 if known else self._measured(figure, row)
        return self._intervals[key]

    def _measured(self, figure: Figure, row: ResultRow) -> Interval:
        first, *rest = self.ratios(figure, row)
        sums = [(float(over_N.sum()), float(under_N.sum())) for over_N, under_N in (first, *rest)]
        if not all(under and math.isfinite(over / under) for over, under in sums):
            return _UNKNOWN
        rng = named_generator(self._seed, figure, self.num_examples)
        match figure:
            case "quality":
                return bounded_mean_interval(first[0], rng=rng)
            case "relative quality":
                return bounded_ratio_interval(first[0], rest[0][1], rng=rng)
            case "rejection rate":
                return ratio_interval(*first, rng=rng, most=1.0, counted=True)
            case "deferral rate":
                return ratio_interval(*first, rng=rng)
            case "speedup" | "decoding speedup":
                (tokens_N, seconds_N), *_ = rest
                return ratio_of_ratios_interval(first, (seconds_N, tokens_N), rng=rng)

    def ratios(self, figure: Figure, row: ResultRow) -> Ratios:
        """Numerators and denominators of the ratios of sums whose product is the figure."""
        rows = row.examples

        def column(of: Callable[[ExampleRow], float]) -> Tensor:
            return torch.tensor([of(example) for example in rows], dtype=torch.float64)

        ones_N = torch.ones(len(rows), dtype=torch.float64)
        match figure:
            case "quality":
                return [(_scores(row), ones_N)]
            case "relative quality":
                return [(_scores(row), ones_N), (ones_N, _scores(self.target))]
            case "rejection rate":
                rejected_N = column(lambda answer: answer.num_rejected)
                return [(rejected_N, column(lambda answer: answer.num_examined))]
            case "deferral rate":
                calls_N = column(lambda answer: answer.num_target_calls)
                prefill_N = column(lambda answer: answer.num_prefill_tokens)
                return [(calls_N, column(lambda answer: len(answer.tokens)) - prefill_N)]
            case "speedup":
                return _times(row)
            case "decoding speedup":
                return _times(row, after_first=True)


def is_lossless(row: ResultRow) -> bool:
    """True if the cell's decoding is lossless."""
    strategy = row.decoding.strategy
    return isinstance(strategy, Speculative) and isinstance(strategy.rule, Lossless)


def _scores(row: ResultRow) -> Tensor:
    scores = [math.nan if answer.score is None else answer.score for answer in row.examples]
    return torch.tensor(scores, dtype=torch.float64)


def _times(row: ResultRow, *, after_first: bool = False) -> Ratios:
    """Seconds / tokens of the target alone, and tokens / seconds of the row; 0 if not timed."""
    columns: list[list[float]] = [[], [], [], []]
    for answer in row.examples:
        values = [0.0] * 4
        if (alone := answer.baseline) is not None:
            values = [alone.seconds, alone.num_tokens, len(answer.tokens), answer.seconds]
            if after_first:
                firsts = [alone.first_seconds, 1, answer.num_first_tokens, answer.first_seconds]
                values = [whole - first for whole, first in zip(values, firsts, strict=True)]
        for column, value in zip(columns, values, strict=True):
            column.append(value)
    parts = [torch.tensor(column, dtype=torch.float64) for column in columns]
    return [(parts[0], parts[1]), (parts[2], parts[3])]
