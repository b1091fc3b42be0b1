"""Intervals for ratios of sums, by resampling the independent units (prompts, pairs of runs)."""

# N units, R resamples
from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Interval(NamedTuple):
    """A value with the interval that holds the truth at the stated confidence."""

    value: float
    low: float
    high: float


# 0.975 quantiles of Student's t with 1, 2, ... degrees of freedom; beyond, the normal's with its
# first correction.
_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
_NORMAL = 1.959964


def mean_interval(values_N: Tensor) -> Interval:
    """Mean of few independent values, such as runs with different seeds, with Student's 95% interval.

    Shapes: [N], N at least 2.

    Raises:
        ValueError: fewer than two values, which say nothing of their spread.
    """
    count = len(values_N)
    if count < 2:
        raise ValueError(f"wanted at least 2 values, got {count}")
    freedom = count - 1
    if freedom <= len(_STUDENT):
        quantile = _STUDENT[freedom - 1]
    else:  # Cornish and Fisher's expansion, right to 0.002 from here on
        z = _NORMAL
        quantile = (
            z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
        )
    mean = float(values_N.double().mean())
    half = quantile * float(values_N.double().std(correction=1)) / count**0.5
    return Interval(mean, mean - half, mean + half)


def ratio_interval(
    numerators_N: Tensor,
    denominators_N: Tensor,
    *,
    rng: torch.Generator,
    confidence: float = 0.95,
    num_resamples: int = 4000,
) -> Interval:
    """sum(numerators) / sum(denominators) with a percentile interval over resampled units.

    A ratio of sums, not a mean of ratios: long texts weigh more, as in E[sum beta] / E[length].

    Shapes: [N] each, one entry an independent unit.

    Raises:
        ValueError: no unit, or denominators that sum to 0.
    """
    return _interval([(numerators_N, denominators_N)], rng, confidence, num_resamples)


def ratio_of_ratios_interval(
    over: tuple[Tensor, Tensor],
    under: tuple[Tensor, Tensor],
    *,
    rng: torch.Generator,
    confidence: float = 0.95,
    num_resamples: int = 4000,
) -> Interval:
    """One ratio of sums divided by another, such as seconds a token of two ways to write.

    Both belong to the same units, which are drawn together: what makes a unit slow for both cancels.

    Shapes: (numerators, denominators) of either ratio, [N] each.

    Raises:
        ValueError: no unit, or sums of 0 where something is divided by them.
    """
    return _interval([over, (under[1], under[0])], rng, confidence, num_resamples)


def _interval(
    ratios: list[tuple[Tensor, Tensor]],
    rng: torch.Generator,
    confidence: float,
    num_resamples: int,
) -> Interval:
    """The product of ratios of sums, with its percentile interval."""
    shapes = [tuple(part.shape) for ratio in ratios for part in ratio]
    if len(set(shapes)) > 1 or len(shapes[0]) != 1:
        raise ValueError(f"wanted {len(shapes)} vectors of one length, got {shapes}")
    (num_units,) = shapes[0]
    if num_units == 0 or any(bottoms_N.sum() == 0 for _, bottoms_N in ratios):
        raise ValueError("no units to take a ratio of")
    picks_RN = torch.randint(num_units, (num_resamples, num_units), generator=rng)
    value, products_R = 1.0, torch.ones(num_resamples, dtype=torch.float64)
    for tops_N, bottoms_N in ratios:
        value *= float(tops_N.double().sum() / bottoms_N.double().sum())
        products_R = products_R * tops_N.double()[picks_RN].sum(-1)
        products_R = products_R / bottoms_N.double()[picks_RN].sum(-1)
    tail = (1 - confidence) / 2
    found_R = products_R[products_R.isfinite()]  # a resample may consist of empty units
    low, high = torch.quantile(found_R, torch.tensor([tail, 1 - tail], dtype=torch.float64))
    return Interval(value, float(low), float(high))
