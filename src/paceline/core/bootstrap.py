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
    if numerators_N.shape != denominators_N.shape or numerators_N.ndim != 1:
        raise ValueError(
            f"wanted two vectors of one length, got {tuple(numerators_N.shape)} and "
            f"{tuple(denominators_N.shape)}"
        )
    num_units = numerators_N.shape[0]
    if num_units == 0 or denominators_N.sum() == 0:
        raise ValueError("no units to take a ratio of")
    numerators, denominators = numerators_N.double(), denominators_N.double()
    picks_RN = torch.randint(num_units, (num_resamples, num_units), generator=rng)
    tops = numerators[picks_RN].sum(-1)
    bottoms = denominators[picks_RN].sum(-1)
    ratios = tops[bottoms > 0] / bottoms[bottoms > 0]
    tail = (1 - confidence) / 2
    low, high = torch.quantile(ratios, torch.tensor([tail, 1 - tail], dtype=torch.float64))
    return Interval(float(numerators.sum() / denominators.sum()), float(low), float(high))
