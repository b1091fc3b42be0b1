"""Two rows by one figure, on rows made by hand."""

import math

import numpy as np
import pytest

from paceline.measure.measurement import paired_difference
from paceline.results.figures import FIGURES
from paceline.results.row import Row
from support.results import result_row


def rows_on(units: range, seed: int, gain: float = 0.0) -> Row:
    """Tokens and calls of blocks; what makes a unit hard is the same for every seed."""
    hard, own = np.random.default_rng(0), np.random.default_rng(seed)
    calls = hard.integers(4, 30, 64)
    tau = 2 + hard.normal(0, 0.5, 64) + own.normal(0, 0.05, 64) + gain
    sums = {"emitted": (calls * tau).tolist(), "calls": calls.tolist()}
    return result_row(sums, gamma=5, parameter_ratio=0.1, seed=seed).only(units)


def test_a_paired_difference_has_the_interval_of_a_paired_bootstrap():
    """By numpy, 50,000 resamples. An unpaired interval would be ten times as wide."""
    first, second = rows_on(range(64), 1, gain=0.1), rows_on(range(64), 2)
    sums = [np.array([row.sums["emitted"], row.sums["calls"]]) for row in (first, second)]
    picks = np.random.default_rng(3).integers(0, 64, (50_000, 64))
    taus = [side[0][picks].sum(1) / side[1][picks].sum(1) for side in sums]
    low, high = np.quantile(taus[0] - taus[1], [0.025, 0.975])
    found = paired_difference(FIGURES["block_efficiency"], first, second)
    values = [side[0].sum() / side[1].sum() for side in sums]
    assert found.value == pytest.approx(values[0] - values[1])
    assert found.low == pytest.approx(low, abs=0.15 * (high - low))
    assert found.high == pytest.approx(high, abs=0.15 * (high - low))
    other = paired_difference(FIGURES["block_efficiency"], second, first)
    assert other.value == pytest.approx(-found.value)
    # MBSU is tau / (0.1 * 5 + 1)
    mbsu = paired_difference(FIGURES["mbsu"], first, second)
    assert mbsu.value == pytest.approx(found.value / 1.5)
    assert mbsu.high - mbsu.low == pytest.approx((found.high - found.low) / 1.5, rel=0.1)


def test_a_paired_difference_is_on_the_units_of_both():
    part = paired_difference(
        FIGURES["block_efficiency"], rows_on(range(20, 64), 1), rows_on(range(40), 2)
    )
    shared = range(20, 40)
    both = [rows_on(shared, seed) for seed in (1, 2)]
    values = [sum(row.sums["emitted"]) / sum(row.sums["calls"]) for row in both]  # type: ignore
    assert part.value == pytest.approx(values[0] - values[1])
    one = paired_difference(FIGURES["block_efficiency"], *(row.only([25]) for row in both))
    assert (one.low, one.high) == (-math.inf, math.inf)
