"""Computes figures with intervals from result rows, and the best cell under a constraint.

Intervals come from resampling the examples, with the same resamples for all cells: difficult
examples are difficult for every cell. The best cell is selected in each resample, so its interval
includes the uncertainty of the selection.
"""

# C cells, N examples, R resamples
from __future__ import annotations

import math
from functools import cached_property, partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from paceline.bench.schema import Baseline, ExampleRow, ResultRow, family
from paceline.core.bootstrap import Interval, draw_resamples, percentile_interval
from paceline.core.rules import Lossless
from paceline.decode.strategies import Autoregressive, Speculative
from paceline.errors import UsageError
from paceline.rng import named_generator

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

NUM_RESAMPLES = 2000


class Reached(NamedTuple):
    """The best cell that meets a constraint.

    Attributes:
        row: The cell.
        value: Its figure, with a 95% interval over the resamples where a cell meets the constraint.
        share: Fraction of these resamples.
    """

    row: ResultRow
    value: Interval
    share: float


class Frontier:
    """The finished cells of one temperature.

    Attributes:
        rows: The cells, [C].
        target: The cell of the target alone.
        num_examples: Number of examples per cell.
        num_timed: Number of examples on which speed is measured.
        quality_CR: Mean score; NaN if the task has no metric. Index 0 of R is the data itself.
        relative_CR: Mean score / the target's.
        granted_CR: `relative_CR`, but at least 1 for the target alone and for lossless cells, which
            have the target's quality: lower scores above temperature 0 are random.
        speed_CR: Seconds per token of the target alone / of the cell, whole requests.
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
        self.num_examples = num_examples = len(self.target.examples)
        rng = named_generator(seed, "frontier", num_examples)
        picks_RN = draw_resamples(num_examples, num_resamples, rng)
        # how often each example is in a resample: a sum over it is a product of matrices
        self._weights_RN = torch.ones(1 + num_resamples, num_examples, dtype=torch.float64)
        self._weights_RN[1:] = 0
        self._weights_RN[1:].scatter_add_(1, picks_RN, torch.ones_like(picks_RN).double())
        self.quality_CR = torch.stack([self._ratio(row, _score, lambda _: 1.0) for row in rows])
        self.speed_CR = torch.stack([self._speed(row) for row in rows])
        at = self.rows.index(self.target)
        self.relative_CR = _rounded(self.quality_CR / self.quality_CR[at])
        proven_C = torch.tensor([row is self.target or is_lossless(row) for row in rows])
        granted_CR = self.relative_CR.nan_to_num(1).clamp(min=1)
        self.granted_CR = granted_CR.where(proven_C[:, None], self.relative_CR)

    def indices(self, cells: Sequence[ResultRow]) -> Tensor:
        """Their places in the first axis, [cells]."""
        return torch.tensor([self.rows.index(row) for row in cells])

    def quality(self, row: ResultRow) -> Interval:
        """Mean score."""
        return _known(self.quality_CR[self.rows.index(row)], self.num_examples)

    def relative_quality(self, row: ResultRow) -> Interval:
        """Mean score / that of the target alone, on the same examples."""
        return _known(self.relative_CR[self.rows.index(row)], self.num_examples)

    def speedup(self, row: ResultRow) -> Interval:
        """Seconds per token of the target alone / of this cell."""
        return _known(self.speed_CR[self.rows.index(row)], self.num_timed)

    def against_itself(self) -> Interval:
        """Speedup of the target alone, measured as a cell: 1 apart from noise."""
        return _known(self._ratio_of_times(self.target), self.num_timed)

    def decoding_speedup(self, row: ResultRow) -> Interval:
        """Speedup after the first token, or after the first block if that contains it."""
        baseline_R = self._timed_ratio(
            row,
            lambda _, alone: alone.seconds - alone.first_seconds,
            lambda _, alone: alone.num_tokens - 1,
        )
        own_R = self._timed_ratio(
            row,
            lambda one, _: one.seconds - one.first_seconds,
            lambda one, _: len(one.tokens) - one.num_first_tokens,
        )
        return _known(baseline_R / own_R, self.num_timed)

    def rejection_rate(self, row: ResultRow) -> Interval:
        """Rejected / examined drafted tokens; NaN if none are examined."""
        return _known(self.rejection_rates[self.rows.index(row)], self.num_examples)

    def deferral_rate(self, row: ResultRow) -> Interval:
        """Target calls / tokens, without the prefill and its tokens."""
        return _known(self.deferral_rates[self.rows.index(row)], self.num_examples)

    @cached_property
    def rejection_rates(self) -> Tensor:
        """`rejection_rate` of each cell in the data and in each resample, [C, 1 + R]."""
        rates = [
            self._ratio(row, lambda one: one.num_rejected, lambda one: one.num_examined)
            for row in self.rows
        ]
        return torch.stack(rates)

    @cached_property
    def deferral_rates(self) -> Tensor:
        """`deferral_rate` of each cell in the data and in each resample, [C, 1 + R]."""

        def generated(one: ExampleRow) -> float:
            return len(one.tokens) - one.num_prefill_tokens

        calls = [self._ratio(row, lambda one: one.num_target_calls, generated) for row in self.rows]
        return torch.stack(calls)

    def fastest(self, cells: Sequence[ResultRow], floor: float) -> Reached | None:
        """The highest speedup with at least `floor` of the target's quality; None if none."""
        return self._best(cells, self.speed_CR, self.granted_CR, floor)

    def finest(self, cells: Sequence[ResultRow], speedup: float = 1.0) -> Reached | None:
        """The highest quality relative to the target's, at this speedup or more; None if none."""
        return self._best(cells, self.relative_CR, self.speed_CR, speedup)

    def families(self) -> dict[str, list[ResultRow]]:
        """The cells of each curve of a frontier plot."""
        found: dict[str, list[ResultRow]] = {}
        for row in self.rows:
            found.setdefault(family(row.decoding), []).append(row)
        return found

    def _best(
        self, cells: Sequence[ResultRow], wanted_CR: Tensor, bound_CR: Tensor, floor: float
    ) -> Reached | None:
        at = self.indices(cells)
        met_CR = (bound_CR[at] >= floor) & wanted_CR[at].isfinite()
        value_CR = wanted_CR[at].where(met_CR, -torch.inf)
        best_R, which_R = value_CR.max(0)
        if best_R[0] == -torch.inf:
            return None
        met_R = best_R[1:] > -torch.inf
        found = _known(best_R.where(best_R > -torch.inf, torch.nan), self.num_timed)
        return Reached(cells[int(which_R[0])], found, float(met_R.float().mean()))

    def _speed(self, row: ResultRow) -> Tensor:
        if row is self.target:
            return torch.ones(len(self._weights_RN), dtype=torch.float64)
        return self._ratio_of_times(row)

    def _ratio_of_times(self, row: ResultRow) -> Tensor:
        baseline_R = self._timed_ratio(
            row, lambda _, alone: alone.seconds, lambda _, alone: alone.num_tokens
        )
        own_R = self._timed_ratio(row, lambda one, _: one.seconds, lambda one, _: len(one.tokens))
        return _rounded(baseline_R / own_R)

    def _timed_ratio(
        self,
        row: ResultRow,
        over: Callable[[ExampleRow, Baseline], float],
        under: Callable[[ExampleRow, Baseline], float],
    ) -> Tensor:
        """`_ratio` over the timed examples."""

        def if_timed(count: Callable[[ExampleRow, Baseline], float], one: ExampleRow) -> float:
            return count(one, one.baseline) if one.baseline else 0.0

        return self._ratio(row, partial(if_timed, over), partial(if_timed, under))

    def _ratio(
        self,
        row: ResultRow,
        over: Callable[[ExampleRow], float],
        under: Callable[[ExampleRow], float],
    ) -> Tensor:
        """Ratio of sums over examples in the data and in each resample, [1 + R]."""
        if len(row.examples) != self._weights_RN.shape[1]:
            raise UsageError(
                f"a cell has {len(row.examples)} examples, the target alone "
                f"{self._weights_RN.shape[1]}; run the bench again in a new output directory"
            )
        over_N, under_N = (
            torch.tensor([count(example) for example in row.examples], dtype=torch.float64)
            for count in (over, under)
        )
        return (self._weights_RN @ over_N) / (self._weights_RN @ under_N)


def _rounded(ratios: Tensor) -> Tensor:
    """Without the rounding errors of sums, so that a quality of 0.95 reaches a floor of 0.95."""
    return ratios.round(decimals=12)


def _known(values_R: Tensor, num_units: int) -> Interval:
    """The percentile interval; 0 to infinity for a single unit, whose resamples are all equal."""
    found = percentile_interval(values_R)
    return Interval(found.value, 0.0, math.inf) if num_units == 1 else found


def is_lossless(row: ResultRow) -> bool:
    """True if the cell's decoding is lossless."""
    strategy = row.decoding.strategy
    return isinstance(strategy, Speculative) and isinstance(strategy.rule, Lossless)


def _score(example: ExampleRow) -> float:
    return float("nan") if example.score is None else example.score
