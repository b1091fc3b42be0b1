"""A sequential test by betting keeps its level at any time of looking, and finds what is there.

Streams of 1,500 differences, looked at after each; seeds are fixed. 400 streams per distribution:
at a true rate of 5%, more than 8.5% of them are found with a probability below 1e-3.
"""

import math

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from paceline.core.betting import FRACTIONS, START, after, level_of, log_evidence

LEVEL, STREAMS, LENGTH, MOST_FOUND = 0.05, 400, 1_500, 0.085


def differences(kind: str, mean: float = 0.0) -> NDArray[np.float64]:
    """Independent differences in [-1, 1] of this mean, [STREAMS, LENGTH]."""
    rng = np.random.default_rng(7)
    shape = STREAMS, LENGTH
    match kind:
        case "narrow":
            found = rng.normal(0, 0.08, shape)
        case "rare gains":  # its mean is easily taken to be below 0, and its losses for certain
            found = np.where(rng.random(shape) < 0.01, 0.99, -0.01)
        case "rare losses":
            found = np.where(rng.random(shape) < 0.01, -0.99, 0.01)
        case _:
            found = rng.choice([-0.75, 0.75], shape)
    return np.clip(found + mean, -1, 1)


def ever_found(values: NDArray[np.float64]) -> float:
    """Share of streams in which the capital ever reaches 1 / LEVEL, by numpy."""
    capitals = np.mean([np.cumprod(1 + part * values, axis=1) for part in FRACTIONS], axis=0)
    return float((capitals.max(1) >= 1 / LEVEL).mean())


KINDS = "narrow", "rare gains", "rare losses", "coins"


@pytest.mark.parametrize("kind", KINDS)
def test_of_streams_without_a_gain_few_are_ever_found(kind: str):
    assert ever_found(differences(kind)) <= MOST_FOUND


def test_a_test_of_fixed_length_that_is_looked_at_again_is_found_out():
    """The mutant: Student's t after each 30 differences finds a gain in a fifth of the streams."""
    values = differences("narrow")
    looks = range(30, LENGTH, 30)
    found = [stats.ttest_1samp(values[:, :n], 0, axis=1, alternative="greater") for n in looks]
    assert np.mean(np.stack([np.asarray(one[1]) for one in found]).min(0) < LEVEL) > 2 * MOST_FOUND


def test_a_gain_is_found():
    """5% of a token's calls with a spread of 8%: nearly always within 150 texts."""
    assert ever_found(differences("narrow", 0.05)[:, :150]) > 0.95


@pytest.mark.parametrize("kind", KINDS)
def test_the_capital_is_the_mean_of_products(kind: str):
    values = differences(kind)[0, :200]
    capitals = [math.prod(1 + part * value for value in values) for part in FRACTIONS]
    in_parts = after(after(START, values[:70]), values[70:])
    assert log_evidence(in_parts) == pytest.approx(math.log(np.mean(capitals)), abs=1e-9)


def test_no_difference_may_be_beyond_what_a_bet_can_lose():
    with pytest.raises(ValueError, match=r"got -1\.5"):
        after(START, [0.1, -1.5])


def test_the_levels_of_all_tests_sum_to_the_error_rate():
    assert sum(level_of(number, 0.05) for number in range(1, 100_000)) == pytest.approx(0.05, 1e-4)
