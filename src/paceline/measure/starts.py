"""Variation between starts of a server, as part of the intervals of its seconds.

A server that is started again may be faster or slower as a whole, for all of its answers. Model:
the logarithm of the seconds per step of a configuration (drafted tokens per block, or no draft) in
one start is

    its true value + an error of the start + an error of the timings in the start

with normal errors of starts, independent between starts, of one standard deviation for all
configurations. Let s^2 be the variance over a configuration's K starts, pooled over C
configurations, with C (K - 1) degrees of freedom. Batch sizes and requests timed in the same start
share its error: s^2 is their mean, and they add no degrees of freedom. A mean over K starts has the
standard error s / sqrt(K), a ratio of two configurations s sqrt(2 / K).

The interval over requests or rounds, of half-width w in logarithms, becomes

    sqrt(w^2 + (t s)^2 m / K)     m = 1 for a cost, 2 for a ratio; t of Student's distribution

which holds the sum of two independent errors at least as often as each part its own (Banerjee
1960). As s contains some of the variation within a start, it is somewhat wider than needed.

Coverage of 95% intervals in simulations with 2 starts
(`tests/statistical/test_starts.py`), where the standard deviation between starts is

                                  0        3%       10%
    speedup (2 configurations)    98%      97%      95%
      within a start only         95%      76%      37%
    cost of a step (4)            99%      97%      96%
      within a start only         95%      51%      20%
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from pydantic import Field

from paceline.config import StrictModel
from paceline.core.bootstrap import Interval, product_interval, student_quantile

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_LARGEST = 700.0  # of a logarithm


class Starts(StrictModel):
    """Starts of an engine, and what varies between them.

    Attributes:
        number: Starts of each configuration. 1: variation between starts is not in the intervals.
        deviation: Standard deviation between starts of the logarithm of the seconds per step; 0
            with one start.
        freedom: Degrees of freedom of `deviation`.
        seconds: Seconds until all servers were ready.
    """

    number: int = Field(default=1, ge=1)
    deviation: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    freedom: int = Field(default=0, ge=0)
    seconds: float = Field(default=0.0, ge=0, allow_inf_nan=False)

    def widen(self, interval: Interval, terms: int) -> Interval:
        """The interval with the variation between starts.

        `terms`: 1 for the seconds of a configuration, 2 for a ratio of two.
        """
        if not self.freedom:
            return interval
        return product_interval(interval, self._factor(terms))

    def _factor(self, terms: int) -> Interval:
        """The variation between starts alone, as a factor around 1."""
        quantile = student_quantile(0.95, self.freedom)
        half = quantile * self.deviation * (terms / self.number) ** 0.5
        return Interval(1.0, math.exp(-half), math.exp(min(half, _LARGEST)))

    @property
    def words(self) -> str:
        """Remark on the intervals of seconds."""
        if not self.freedom:
            return "variation between starts of a server is not in the intervals of seconds"
        return (
            f"each server was started {self.number} times ({self.seconds:.0f} s in all); intervals "
            f"of seconds contain the variation between starts ({self.deviation:.1%})"
        )


def spread_of(logs: Mapping[int, Sequence[Sequence[float]]], number: int, seconds: float) -> Starts:
    """Pool the variation between starts.

    Args:
        logs: By configuration, for each of its quantities: logarithms of seconds, one per start.
        number: Starts of each configuration.
        seconds: Seconds until all servers were ready.
    """
    timed = [quantities for quantities in logs.values() if quantities]
    if number < 2 or not timed:
        return Starts(number=number, seconds=seconds)
    variances = [torch.tensor(of_starts, dtype=torch.float64).var(-1).mean() for of_starts in timed]
    return Starts(
        number=number,
        deviation=float(torch.stack(variances).mean().sqrt()),
        freedom=len(timed) * (number - 1),
        seconds=seconds,
    )


def turns(configurations: Sequence[int], number: int) -> Iterator[tuple[int, int]]:
    """Each start (from 0) of each configuration: A B, then B A, then A B again.

    In this order, a machine that becomes steadily slower slows all of them by the same amount.
    """
    for start in range(number):
        for configuration in configurations if start % 2 == 0 else reversed(configurations):
            yield start, configuration
