"""Intervals and verdicts of the papers' claims, by scipy, by hand and by shuffling."""

import dataclasses

import numpy as np
import pytest
from papers.statistics import (
    ERROR,
    NAMES,
    Claim,
    Interval,
    error_of_a_claim,
    interval,
    power,
    read_claims,
    verdict,
    verdict_in_each,
)
from scipy import stats

CLAIM = Claim("X1", "says", "place", "words", ({},), margin=0.02, spread=0.03, size=0.05)
NOT_LESS = dataclasses.replace(CLAIM, not_less=True)


def test_the_interval_is_that_of_the_t_test_of_scipy():
    values = np.random.default_rng(0).normal(0.03, 0.05, 12)
    found = interval(values, 0.002)
    expected = stats.ttest_1samp(values, 0).confidence_interval(1 - 0.002)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))
    assert found.num_draws == 12


@pytest.mark.parametrize(
    ("low", "high", "said", "said_of_not_less"),
    [
        (0.01, 0.05, "holds", "holds"),
        (-0.01, 0.05, "undecided", "holds"),
        (-0.01, 0.019, "no gain that matters", "holds"),
        (0.001, 0.019, "no gain that matters", "holds"),
        (-0.03, -0.01, "does not hold", "undecided"),
        (-0.06, -0.03, "does not hold", "does not hold"),
        (-0.06, 0.06, "undecided", "undecided"),
    ],
)
def test_each_place_of_an_interval_has_its_verdict(
    low: float, high: float, said: str, said_of_not_less: str
):
    found = Interval((low + high) / 2, low, high, 8)
    assert verdict(CLAIM, found) == said
    assert verdict(NOT_LESS, found) == said_of_not_less


def test_a_claim_on_several_tasks_holds_only_in_all():
    holds, opposite = Interval(0.03, 0.01, 0.05, 8), Interval(-0.03, -0.05, -0.01, 8)
    unclear = Interval(0.0, -0.05, 0.05, 8)
    assert verdict_in_each(CLAIM, [holds, holds]) == "holds"
    assert verdict_in_each(CLAIM, [holds, unclear]) == "undecided"
    assert verdict_in_each(CLAIM, [unclear, opposite]) == "does not hold"


def test_power_is_the_share_of_drawn_studies_that_hold():
    drawn = np.random.default_rng(1).normal(CLAIM.size, CLAIM.spread, (4000, 10))
    tests = stats.ttest_1samp(drawn, 0, axis=1)
    share = np.mean((tests.pvalue < 0.01) & (tests.statistic > 0))
    assert power(CLAIM, 10, 0.01) == pytest.approx(share, abs=0.03)
    assert power(dataclasses.replace(CLAIM, size=None), 10, 0.01) is None


def test_without_an_effect_signs_are_given_as_rarely_as_stated():
    """40,000 studies of 8 draws, heavy tails; the mutant with normal quantiles gives far more."""
    drawn = np.random.default_rng(2).standard_t(5, (40_000, 8)) * 0.03
    error = 0.01
    found = [interval(values, error) for values in drawn[:4000]]
    signs = np.mean([one.low > 0 or one.high < 0 for one in found])
    assert signs < 1.5 * error
    spread = drawn.std(1, ddof=1) / 8**0.5
    mutant = np.mean(np.abs(drawn.mean(1)) > stats.norm.ppf(1 - error / 2) * spread)
    assert mutant > 2.5 * error


def test_the_claims_are_at_most_25_and_each_is_complete():
    claims = [claim for name in NAMES for claim in read_claims(name)]
    assert len({claim.id for claim in claims}) == len(claims) <= 25
    assert error_of_a_claim() == ERROR / len(claims)
    for claim in claims:
        assert claim.says
        assert claim.place
        assert claim.margin > 0
        assert claim.spread > 0
