"""A sequential test of a mean by betting, which may be looked at after every observation.

A player bets fractions of a capital of 1 on differences in [-1, 1] being positive. If their mean
given the past is never above 0, the capital is a nonnegative supermartingale: it ever reaches 1/a
with a probability of at most a (Ville 1939). So a large capital is evidence of a positive mean,
whenever one looks, whatever the distribution, and without a number of observations fixed before.

Tests: `tests/statistical/test_betting.py`.

Paper: Waudby-Smith and Ramdas 2024, "Estimating means of bounded random variables by betting",
section 4. Differs: their bets adapt to the past; these are fixed fractions, an equal part of the
capital on each, which needs no tuning and loses at most log(number of fractions) against the best.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

FRACTIONS = (0.9, 0.5, 0.25, 0.125, 0.0625, 0.03125)
"""Of the capital, that are bet on each difference."""
START = (0.0,) * len(FRACTIONS)
"""Logarithms of the capitals before any observation."""


def after(log_capitals: Sequence[float], differences: Iterable[float]) -> tuple[float, ...]:
    """Logarithms of the capitals after these differences: each adds log(1 + fraction difference).

    Raises:
        ValueError: a difference is not in [-1, 1].
    """
    found = list(log_capitals)
    for difference in differences:
        if not -1 <= difference <= 1:
            raise ValueError(f"wanted differences in [-1, 1], got {difference}")
        for at, fraction in enumerate(FRACTIONS):
            found[at] += math.log1p(fraction * difference)
    return tuple(found)


def log_evidence(log_capitals: Sequence[float]) -> float:
    """Logarithm of the whole capital, the mean of the parts; above log(1/a): shown at level a."""
    most = max(log_capitals)
    return most + math.log(math.fsum(math.exp(one - most) for one in log_capitals) / len(FRACTIONS))


def level_of(number: int, error_rate: float) -> float:
    """The level of test 1, 2, 3, ... of an endless series: error_rate / (number (number + 1)).

    The levels sum to `error_rate`, which bounds the probability that any of the tests is wrong.
    """
    return error_rate / (number * (number + 1))
