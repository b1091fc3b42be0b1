"""Figures of all answers together, such as corpus BLEU, with intervals over examples.

Corpus BLEU is a function of n-gram counts that are summed over examples, not a mean of scores. Its
interval comes from the figures without each example in turn (jackknife), with Student's t on the
scale of log(figure / (most - figure)). Means of scores have the interval of `core.bounded_means`.

Coverage of 95% intervals of corpus BLEU in simulations of short sentences
(`tests/statistical/test_corpus_figures.py`):

    corpus BLEU                 30                  10                  3.6
    examples                    16    64    400     16    64    400     16    64    400
    these intervals             95%   94%   94%     87%   96%   95%     69%   91%   94%
    bootstrap percentiles       89%   93%   96%     77%   87%   94%     57%   84%   92%

Where few examples have any four words in a row right, few examples say little about BLEU.
"""

# N examples, K counts of an example
from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch

from paceline.core.bootstrap import Interval, student_quantile
from paceline.core.bounded_means import bounded_mean_interval
from paceline.rng import named_generator

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor


class CorpusCounts(NamedTuple):
    """Sufficient statistics of a figure.

    Attributes:
        counts_NK: Of each example.
        figure: The figure of their sums, [K].
        most: Largest value of the figure; the smallest is 0.
    """

    counts_NK: Tensor
    figure: Callable[[list[float]], float]
    most: float

    def value(self) -> float:
        """The figure of all examples."""
        return self.figure(self.counts_NK.sum(0).tolist())

    def interval(self) -> Interval | None:
        """The figure with its 95% interval; None if all examples give the same figure."""
        count, value = len(self.counts_NK), self.value()
        if count < 2:
            return None
        without_NK = self.counts_NK.sum(0) - self.counts_NK
        without_N = torch.tensor(list(map(self.figure, without_NK.tolist())), dtype=torch.float64)
        shares_N = without_N / self.most
        is_inside = bool(((shares_N > 0) & (shares_N < 1)).all()) and 0 < value < self.most
        points_N = shares_N.logit() if is_inside else without_N
        error = float(points_N.std(correction=0)) * (count - 1) ** 0.5
        if not error:
            return None
        half = student_quantile(0.95, count - 1) * error
        if not is_inside:
            return Interval(value, max(0.0, value - half), min(self.most, value + half))
        place = math.log(value / (self.most - value))
        low, high = (self.most / (1 + math.exp(-place - side)) for side in (-half, half))
        return Interval(value, low, high)


class CorpusMean(NamedTuple):
    """The mean of scores in [0, 1] times `most`."""

    scores_N: Tensor
    most: float

    def value(self) -> float:
        """The figure of all examples."""
        return self.most * float(self.scores_N.mean())

    def interval(self) -> Interval:
        """The figure with its 95% interval."""
        rng = named_generator(0, "mean score", len(self.scores_N))
        found = bounded_mean_interval(self.scores_N, rng=rng)
        return Interval(*(self.most * one for one in found))


CorpusFigure: TypeAlias = CorpusCounts | CorpusMean


def means(scores: Mapping[str, Sequence[float]], *, most: float = 1.0) -> dict[str, CorpusFigure]:
    """Means of scores by name; `most` is the figure of a mean of 1."""
    return {
        name: CorpusMean(torch.tensor(values, dtype=torch.float64), most)
        for name, values in scores.items()
    }
