"""Confidence intervals of means where a few rare values may decide, such as scores from 0 to 1.

A sample of scores near a bound says little about the rare scores that are far from it: Student's
interval of 64 answers that are all right has width 0, and far in the tail its error is many times
what it states. For values within known bounds, these intervals weigh the sample with Dirichlet
weights, together with one more value at the worst bound. For scores of 0 and 1 they are those of
Clopper and Pearson, so their coverage is at least the confidence; for other scores no exception is
known. Without known bounds, an interval is that of the bootstrap-t, and nowhere inside Student's.

Errors as multiples of the nominal tail, 3.3e-4, in 20,000 samples (the worse side; "rare": 5% of
values lose up to 0.2, the others differ by 0.003; they are known to be in [-1, 1]):

    sample            log-normal (0.8)      exponential       normal        rare
    size               48   128   500     48  128  500     128  500        100
    Student          28.8  14.5   7.0   15.2  5.8  3.3     0.8  1.7        149
    these intervals   6.4   4.4   2.0    2.4  1.1  1.8     0.8  1.5          0

Tests: `tests/statistical/test_score_intervals.py`.

Paper: Gaffke 2005, "Three test statistics for a nonparametric one-sided hypothesis on the mean of a
nonnegative variable"; Learned-Miller and Thomas 2019, "A new confidence interval for the mean of a
bounded random variable", section 3; Efron and Tibshirani 1993, section 12.5 (bootstrap-t).
"""

# N values, R draws
from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.core.bootstrap import DEGENERATE, Interval, resampled_means, student_quantile

if TYPE_CHECKING:
    from collections.abc import Iterator

_NUM_AT_ONCE = 2_000_000
_LEAST_DRAWS = 4000
_BEYOND = 20  # draws beyond a bound, at least
_FARTHER = 1.5  # than the farthest value, if the sample alone shows how far values can be
_ROUNDING = 1e-12  # a spread that can be rounding


def mean_bounds(
    values_N: Tensor,
    tail: float,
    rng: torch.Generator,
    extremes: tuple[float, float] | None = None,
) -> tuple[float, float]:
    """Bounds of the error of a mean of independent values: add them to the mean.

    Args:
        values_N: The values, [N], 2 or more.
        tail: Probability beyond either bound.
        rng: Random numbers.
        extremes: Least and largest possible value; None: not known.
    """
    values_N = values_N.double()
    if extremes is not None:
        return _within_extremes(values_N, tail, rng, extremes)
    low, high = _studentised(values_N, tail, rng)
    if not math.isfinite(high - low):  # resamples without spread are too frequent
        least, most = _within_extremes(values_N, tail, rng, None)
        low, high = max(low, least), min(high, most)
    error = float(values_N.std()) / len(values_N) ** 0.5
    student = error * student_quantile(1 - 2 * tail, len(values_N) - 1)
    return min(low, -student), max(high, student)


def _within_extremes(
    values_N: Tensor, tail: float, rng: torch.Generator, extremes: tuple[float, float] | None
) -> tuple[float, float]:
    mean = float(values_N.mean())
    errors_N = values_N - mean
    farthest = _FARTHER * float(errors_N.abs().max())
    least, most = (-farthest, farthest) if extremes is None else (one - mean for one in extremes)
    lows, highs = list[Tensor](), list[Tensor]()
    for weights_RN in _weights(len(values_N) + 1, _num_draws(tail), rng):
        sums_R, shared_R = weights_RN[:, 1:] @ errors_N, weights_RN.sum(-1)
        lows.append((sums_R + weights_RN[:, 0] * least) / shared_R)
        highs.append((sums_R + weights_RN[:, 0] * most) / shared_R)
    low, high = _quantiles(torch.cat(lows), torch.cat(highs), tail)
    return min(low, 0.0), max(high, 0.0)


def _studentised(values_N: Tensor, tail: float, rng: torch.Generator) -> tuple[float, float]:
    """Bootstrap-t bounds; infinite if too many resamples lack spread."""
    num_draws, size = max(_LEAST_DRAWS // 2, math.ceil(_BEYOND / tail)), len(values_N)
    errors_N = values_N - values_N.mean()
    spread = (float(errors_N.square().mean()) / (size - 1)) ** 0.5
    if spread < _ROUNDING:
        return 0.0, 0.0
    columns_N2 = torch.stack([errors_N, errors_N.square()], 1)
    means_R, squares_R = resampled_means(columns_N2, num_draws, rng).unbind(1)
    spreads_R = ((squares_R - means_R.square()).clamp(min=0) / (size - 1)).sqrt()
    scores_R = means_R / spreads_R.where(spreads_R > DEGENERATE * spread, 0.0)
    scores_R = scores_R[~scores_R.isnan()]
    low, high = _quantiles(scores_R, scores_R, tail)
    return -high * spread, -low * spread


def _num_draws(tail: float) -> int:
    return max(_LEAST_DRAWS, math.ceil(_BEYOND / tail))


def bounded_mean_interval(
    values_N: Tensor,
    *,
    rng: torch.Generator,
    confidence: float = 0.95,
    least: float = 0.0,
    most: float = 1.0,
) -> Interval:
    """Mean of independent values in [least, most], with its interval.

    Lower bound: the quantile of sum_i w_i x_i + w_0 least, where w is uniform on the simplex. Upper
    bound: likewise with `most`.

    Shapes: [N].

    Raises:
        ValueError: no values, or values beyond the bounds.
    """
    values_N = _checked(values_N, least, most)
    value = float(values_N.mean())
    low, high = mean_bounds(values_N, (1 - confidence) / 2, rng, (least, most))
    # without rounding errors
    return Interval(value, max(value + low, least), min(value + high, most))


def bounded_ratio_interval(
    over_N: Tensor, under_N: Tensor, *, rng: torch.Generator, confidence: float = 0.95
) -> Interval:
    """Ratio of the means of two scores of the same units, in [0, 1], with its interval.

    As `bounded_mean_interval`; the added unit has the scores (0, m) for the lower bound and (m, 0)
    for the upper bound, where m is the largest score of all. Scores such as ROUGE hardly reach 1,
    and a unit of 1 would outweigh them.

    Shapes: [N] each.

    Raises:
        ValueError: no values, values beyond the bounds, or a denominator of 0.
    """
    over_N, under_N = (_checked(part_N, 0.0, 1.0) for part_N in (over_N, under_N))
    most = float(torch.cat([over_N, under_N]).max())
    if not float(under_N.sum()):
        raise ValueError("a ratio of means needs a denominator above 0")
    value, tail = float(over_N.mean() / under_N.mean()), (1 - confidence) / 2
    lows, highs = list[Tensor](), list[Tensor]()
    for weights_RN in _weights(len(over_N) + 1, _num_draws(tail), rng):
        tops_R, bottoms_R = weights_RN[:, 1:] @ over_N, weights_RN[:, 1:] @ under_N
        added_R = weights_RN[:, 0] * most
        lows.append(tops_R / (bottoms_R + added_R))
        highs.append((tops_R + added_R) / bottoms_R)
    low, high = _quantiles(torch.cat(lows), torch.cat(highs), tail)
    return Interval(value, min(low, value), max(high, value))


def _quantiles(low_R: Tensor, high_R: Tensor, tail: float) -> tuple[float, float]:
    rank = 1 + int(tail * len(low_R))
    return float(low_R.kthvalue(rank).values), -float((-high_R).kthvalue(rank).values)


def _weights(width: int, num_draws: int, rng: torch.Generator) -> Iterator[Tensor]:
    """Exponential numbers, which are uniform on the simplex if divided by their sum, [R, width]."""
    at_once = max(1, _NUM_AT_ONCE // width)
    for begun in range(0, num_draws, at_once):
        shape = min(at_once, num_draws - begun), width
        weights_RN, after = _drawn_weights(shape, rng.get_state().numpy().tobytes())
        rng.set_state(after)
        yield weights_RN


# Samples of equal size share their seed, and to draw takes most of the time of an interval.
@functools.lru_cache(maxsize=4)
def _drawn_weights(shape: tuple[int, int], state: bytes) -> tuple[Tensor, Tensor]:
    """The numbers from this state of a generator, and its state afterwards."""
    rng = torch.Generator()
    rng.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    uniforms_RN = torch.rand(shape, generator=rng, dtype=torch.float64)
    # several times faster than `exponential_`
    return -uniforms_RN.clamp(min=1e-300).log(), rng.get_state()


def _checked(values_N: Tensor, least: float, most: float) -> Tensor:
    values_N = values_N.double()
    if not len(values_N):
        raise ValueError("wanted at least 1 value, got none")
    if not bool(((values_N >= least) & (values_N <= most)).all()):
        raise ValueError(f"wanted values in [{least:g}, {most:g}]; use mean_interval for others")
    return values_N
