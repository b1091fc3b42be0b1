"""Confidence intervals of mean scores from 0 to 1, where a few rare values may decide.

A sample of scores near a bound says little about the rare scores that are far from it: Student's
interval of 64 answers that are all right has width 0, and far in the tail its error is many times
what it states. These intervals weigh the sample with Dirichlet weights, together with one more
value at the worst bound. For scores of 0 and 1 they are those of Clopper and Pearson, so their
coverage is at least the confidence; for other scores no exception is known.

Tests: `tests/statistical/test_score_intervals.py`.

Paper: Gaffke 2005, "Three test statistics for a nonparametric one-sided hypothesis on the mean of a
nonnegative variable"; Learned-Miller and Thomas 2019, "A new confidence interval for the mean of a
bounded random variable", section 3.
"""

# N values, R draws
from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from paceline.core.bootstrap import Interval

_NUM_AT_ONCE = 2_000_000
_LEAST_DRAWS = 4000
_BEYOND = 20  # draws beyond a bound, at least
_SEED = 0  # of the draws, which are the same for all samples of a size


def bounded_mean_interval(values_N: Tensor, confidence: float = 0.95) -> Interval:
    """Mean of independent values in [0, 1], with its interval.

    Lower bound: the quantile of sum_i w_i x_i, where w is uniform on the simplex of one value more;
    upper bound: of sum_i w_i x_i + w_0.

    Shapes: [N].

    Raises:
        ValueError: no values, or values beyond the bounds.
    """
    values_N = _checked(values_N)
    value, tail = float(values_N.mean()), (1 - confidence) / 2
    lows, highs = list[Tensor](), list[Tensor]()
    for weights_RN in _weights(len(values_N) + 1, _num_draws(tail)):
        totals_R, own_R = weights_RN.sum(-1), weights_RN[:, 1:] @ values_N
        lows.append(own_R / totals_R)
        highs.append((own_R + weights_RN[:, 0]) / totals_R)
    low, high = _quantiles(torch.cat(lows), torch.cat(highs), tail)
    # of equal values at a bound, sums differ from it by rounding
    low, high = (0.0 if value == 0 else min(low, value)), (1.0 if value == 1 else max(high, value))
    return Interval(value, low, high)


def bounded_ratio_interval(over_N: Tensor, under_N: Tensor, confidence: float = 0.95) -> Interval:
    """Ratio of the means of two scores of the same units, in [0, 1], with its interval.

    As `bounded_mean_interval`; the added unit has the scores (0, m) for the lower bound and (m, 0)
    for the upper bound, where m is the largest score of all. Scores such as ROUGE hardly reach 1,
    and a unit of 1 would outweigh them.

    Shapes: [N] each.

    Raises:
        ValueError: no values, values beyond the bounds, or a denominator of 0.
    """
    over_N, under_N = map(_checked, (over_N, under_N))
    most = float(torch.cat([over_N, under_N]).max())
    if not float(under_N.sum()):
        raise ValueError("a ratio of means needs a denominator above 0")
    value, tail = float(over_N.mean() / under_N.mean()), (1 - confidence) / 2
    lows, highs = list[Tensor](), list[Tensor]()
    for weights_RN in _weights(len(over_N) + 1, _num_draws(tail)):
        tops_R, bottoms_R = weights_RN[:, 1:] @ over_N, weights_RN[:, 1:] @ under_N
        added_R = weights_RN[:, 0] * most
        lows.append(tops_R / (bottoms_R + added_R))
        highs.append((tops_R + added_R) / bottoms_R)
    low, high = _quantiles(torch.cat(lows), torch.cat(highs), tail)
    return Interval(value, min(low, value), max(high, value))


def _num_draws(tail: float) -> int:
    return max(_LEAST_DRAWS, math.ceil(_BEYOND / tail))


def _quantiles(low_R: Tensor, high_R: Tensor, tail: float) -> tuple[float, float]:
    rank = 1 + int(tail * len(low_R))
    return float(low_R.kthvalue(rank).values), -float((-high_R).kthvalue(rank).values)


# Samples of equal size share their draws, and to draw takes most of the time of an interval.
@functools.lru_cache(maxsize=4)
def _weights(width: int, num_draws: int) -> tuple[Tensor, ...]:
    """Exponential numbers, which are uniform on the simplex if divided by their sum, [R, width]."""
    rng = torch.Generator().manual_seed(_SEED)
    at_once, parts = max(1, _NUM_AT_ONCE // width), list[Tensor]()
    for begun in range(0, num_draws, at_once):
        shape = min(at_once, num_draws - begun), width
        uniforms_RN = torch.rand(shape, generator=rng, dtype=torch.float64)
        # several times faster than `exponential_`
        parts.append(-uniforms_RN.clamp(min=1e-300).log())
    return tuple(parts)


def _checked(values_N: Tensor) -> Tensor:
    values_N = values_N.double()
    if not len(values_N):
        raise ValueError("wanted at least 1 value, got none")
    if not bool(((values_N >= 0) & (values_N <= 1)).all()):
        raise ValueError("wanted values in [0, 1]")
    return values_N
