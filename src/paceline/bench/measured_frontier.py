"""From result rows to a trade-off: figures with intervals, and the best that a family of cells reaches.

Everything is resampled over examples, all cells together: a hard example is hard for every cell, and a
choice among cells is made anew in every resample, so that an interval knows of the choosing too.
"""

# C cells, N examples, R resamples
from __future__ import annotations

import math
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from paceline.bench.schema import ExampleRow, ResultRow, family
from paceline.core.bootstrap import Interval, draw_resamples, percentile_interval
from paceline.core.rules import Lossless
from paceline.decode.strategies import Autoregressive, Speculative
from paceline.errors import UsageError
from paceline.rng import named_generator

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

NUM_RESAMPLES = 2000


class Reached(NamedTuple):
    """The best of some cells that meet a condition.

    `row`: which one it is; `value` with its 95% interval over the resamples that have one; `share`:
    how many of the resamples do.
    """

    row: ResultRow
    value: Interval
    share: float


class Frontier:
    """The finished cells of one temperature.

    Attributes:
        rows: The cells, [C].
        target: That of the target alone.
        num_examples: Examples that each cell answered.
        num_timed: Those of them that speeds are of.
        quality_CR: Mean score; NaN where the task has no metric. The first resample is the data itself.
        relative_CR: Mean score / the target's own.
        granted_CR: The same, of lossless cells and the target alone at least 1: that they answer as
            well is proven, and above temperature 0 a lower score is luck.
        speed_CR: Seconds a token of the target alone / of the cell, whole requests.
    """

    def __init__(self, rows: Sequence[ResultRow], seed: int = 0) -> None:
        alone = [row for row in rows if isinstance(row.decoding.strategy, Autoregressive)]
        if not alone:
            raise UsageError("the target alone has no finished cell; run the bench to its end")
        self.rows = list(rows)
        self.target = alone[0]
        self.num_timed = sum(example.baseline is not None for example in self.target.examples)
        self.num_examples = num_examples = len(self.target.examples)
        rng = named_generator(seed, "frontier", num_examples)
        picks_RN = draw_resamples(num_examples, NUM_RESAMPLES, rng)
        self._picks_RN = torch.cat([torch.arange(num_examples)[None], picks_RN])
        self.quality_CR = torch.stack([self._ratio(row, _score, _one) for row in rows])
        self.speed_CR = torch.stack([self._speed(row) for row in rows])
        at = self.rows.index(self.target)
        self.relative_CR = self.quality_CR / self.quality_CR[at]
        proven_C = torch.tensor([row is self.target or is_lossless(row) for row in rows])
        granted_CR = self.relative_CR.nan_to_num(1).clamp(min=1)
        self.granted_CR = granted_CR.where(proven_C[:, None], self.relative_CR)

    def quality(self, row: ResultRow) -> Interval:
        """Mean score."""
        return _known(self.quality_CR[self.rows.index(row)], self.num_examples)

    def relative_quality(self, row: ResultRow) -> Interval:
        """Mean score / that of the target alone, of the same examples."""
        return _known(self.relative_CR[self.rows.index(row)], self.num_examples)

    def speedup(self, row: ResultRow) -> Interval:
        """Seconds a token of the target alone / of this cell."""
        return _known(self.speed_CR[self.rows.index(row)], self.num_timed)

    def against_itself(self) -> Interval:
        """Seconds a token of the target alone / of the target alone as a cell: 1, but for the noise."""
        return _known(self._ratio_of_times(self.target), self.num_timed)

    def decoding_speedup(self, row: ResultRow) -> Interval:
        """The same behind the first token or, where that comes in a block, behind the first block."""
        baseline_R = self._ratio(row, _baseline_decoding_s, _baseline_decoded)
        return _known(baseline_R / self._ratio(row, _decoding_s, _decoded), self.num_timed)

    def rejection_rate(self, row: ResultRow) -> Interval:
        """Rejected / examined drafted tokens; NaN where nothing is judged."""
        return _known(self.rejection_rates[self.rows.index(row)], self.num_examples)

    def deferral_rate(self, row: ResultRow) -> Interval:
        """Target calls / tokens but for those that came with the prompt."""
        return _known(self.deferral_rates[self.rows.index(row)], self.num_examples)

    @cached_property
    def rejection_rates(self) -> Tensor:
        """Rejected / examined drafted tokens of each cell in each resample, [C, 1 + R]."""
        return torch.stack([self._ratio(row, _rejected, _examined) for row in self.rows])

    @cached_property
    def deferral_rates(self) -> Tensor:
        """Target calls / tokens but for those that came with the prompt, [C, 1 + R]."""
        return torch.stack([self._ratio(row, _calls, _made) for row in self.rows])

    def fastest(self, cells: Sequence[ResultRow], floor: float) -> Reached | None:
        """The largest speedup with at least `floor` of the target's quality; None: not reached."""
        return self._best(cells, self.speed_CR, self.granted_CR, floor)

    def finest(self, cells: Sequence[ResultRow], speedup: float = 1.0) -> Reached | None:
        """The best quality, as part of the target's, at no less than this speedup."""
        return self._best(cells, self.relative_CR, self.speed_CR, speedup)

    def families(self) -> dict[str, list[ResultRow]]:
        """The cells by the curve they lie on."""
        found: dict[str, list[ResultRow]] = {}
        for row in self.rows:
            found.setdefault(family(row.decoding), []).append(row)
        return found

    def _best(
        self, cells: Sequence[ResultRow], wanted_CR: Tensor, bound_CR: Tensor, floor: float
    ) -> Reached | None:
        at = torch.tensor([self.rows.index(row) for row in cells])
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
            return torch.ones(NUM_RESAMPLES + 1, dtype=torch.float64)
        return self._ratio_of_times(row)

    def _ratio_of_times(self, row: ResultRow) -> Tensor:
        baseline = self._ratio(row, _baseline_s, _baseline_tokens)
        return baseline / self._ratio(row, _timed_s, _timed_tokens)

    def _ratio(
        self,
        row: ResultRow,
        over: Callable[[ExampleRow], float],
        under: Callable[[ExampleRow], float],
    ) -> Tensor:
        """Sum / sum in the data and in each resample, [1 + R]."""
        if len(row.examples) != self._picks_RN.shape[1]:
            raise UsageError(
                f"a cell has {len(row.examples)} examples, the target alone "
                f"{self._picks_RN.shape[1]}; run the bench anew"
            )
        over_N, under_N = (
            torch.tensor([count(example) for example in row.examples], dtype=torch.float64)
            for count in (over, under)
        )
        return over_N[self._picks_RN].sum(-1) / under_N[self._picks_RN].sum(-1)


def _known(values_R: Tensor, num_units: int) -> Interval:
    """The percentile interval; of one unit, whose resamples are all the same: 0 to infinity."""
    found = percentile_interval(values_R)
    return Interval(found.value, 0.0, math.inf) if num_units == 1 else found


def is_lossless(row: ResultRow) -> bool:
    """Whether the cell has the target's quality by proof."""
    strategy = row.decoding.strategy
    return isinstance(strategy, Speculative) and isinstance(strategy.rule, Lossless)


def _one(_: ExampleRow) -> float:
    return 1.0


def _rejected(example: ExampleRow) -> float:
    return example.num_rejected


def _examined(example: ExampleRow) -> float:
    return example.num_examined


def _calls(example: ExampleRow) -> float:
    return example.num_target_calls


def _score(example: ExampleRow) -> float:
    return float("nan") if example.score is None else example.score


def _baseline_s(example: ExampleRow) -> float:
    return example.baseline.seconds if example.baseline else 0.0


def _baseline_tokens(example: ExampleRow) -> float:
    return example.baseline.num_tokens if example.baseline else 0.0


def _timed_s(example: ExampleRow) -> float:
    return example.seconds if example.baseline else 0.0


def _timed_tokens(example: ExampleRow) -> float:
    return len(example.tokens) if example.baseline else 0.0


def _baseline_decoding_s(example: ExampleRow) -> float:
    beside = example.baseline
    return beside.seconds - beside.first_seconds if beside else 0.0


def _baseline_decoded(example: ExampleRow) -> float:
    return example.baseline.num_tokens - 1 if example.baseline else 0.0


def _decoding_s(example: ExampleRow) -> float:
    return example.seconds - example.first_seconds if example.baseline else 0.0


def _decoded(example: ExampleRow) -> float:
    return len(example.tokens) - example.num_first_tokens if example.baseline else 0.0


def _made(example: ExampleRow) -> float:
    return len(example.tokens) - example.num_prefill_tokens
