"""Intervals for ratios of sums; their coverage: `statistical/test_intervals.py`."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from paceline.core import bootstrap
from paceline.core.bootstrap import (
    difference_interval,
    median_interval,
    ratio_interval,
    student_quantile,
)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def simulated_units(rng: torch.Generator, count: int) -> tuple[Tensor, Tensor]:
    """Texts of 10 to 109 tokens; longer ones are accepted more."""
    lengths = torch.randint(10, 110, (count,), generator=rng).double()
    rates = 0.3 + 0.4 * lengths / 110 + 0.2 * (torch.rand(count, generator=rng).double() - 0.5)
    return rates * lengths, lengths


def test_the_value_is_the_ratio_of_sums_and_not_the_mean_of_ratios():
    interval = ratio_interval((torch.tensor([1.0, 80.0]), torch.tensor([10.0, 100.0])))
    assert interval.value == pytest.approx(81 / 110)
    interval = ratio_interval(
        (torch.tensor([1.0, 5.0]), torch.tensor([2, 2])),
        (torch.tensor([4, 12]), torch.tensor([1.0, 1.0])),
    )
    assert interval.value == pytest.approx((6 / 4) / (2 / 16))
    # every unit is twice as slow a token in the second way, however long and slow it is itself
    seconds, tokens = torch.tensor([1.0, 9.0, 2.0]), torch.tensor([10, 30, 2])
    interval = ratio_interval((2 * seconds, tokens), (tokens, seconds))
    assert interval == pytest.approx((2, 2, 2))


def test_of_few_units_the_bounds_are_students_with_the_linearised_error():
    tops, bottoms = np.array([1.0, 3.0, 2.0, 6.0]), np.array([2.0, 4.0, 4.0, 5.0])
    interval = ratio_interval((torch.tensor(tops), torch.tensor(bottoms)))
    influence = tops / 3 - bottoms / 3.75  # of each unit on the logarithm
    half = float(stats.t.ppf(0.975, 3)) * math.sqrt((influence**2).sum() / 12)
    assert interval.value == pytest.approx(12 / 15)
    assert interval.low == pytest.approx(12 / 15 * math.exp(-half))
    assert interval.high == pytest.approx(12 / 15 * math.exp(half))


@pytest.mark.parametrize("count", [2, 5, 7])
def test_a_difference_of_two_means_of_few_units_is_paired(count: int):
    """By scipy, of differences per unit; what is large in both cancels."""
    first = 9 * torch.rand(count, generator=generator(count), dtype=torch.float64)
    second = first + torch.rand(count, generator=generator(7), dtype=torch.float64)
    ones = torch.ones(count)
    found = difference_interval([(first, ones)], [(second, ones)])
    paired = stats.ttest_1samp((first - second).numpy(), 0).confidence_interval(0.95)
    assert found[1:] == pytest.approx(tuple(paired))


def test_a_difference_has_scales():
    tops, bottoms = simulated_units(generator(2), 30)
    plain, scaled = (
        difference_interval([(tops, bottoms)], [(bottoms, tops)], scales=scales)
        for scales in ((1.0, 1.0), (-2.0, -2.0))
    )
    assert scaled == pytest.approx((-2 * plain.value, -2 * plain.high, -2 * plain.low))


@pytest.mark.parametrize("freedom", [1, 2, 7, 60, 499, 500, 501, 3000, 10**12])
@pytest.mark.parametrize("confidence", [0.5, 0.8, 0.95, 0.999, 0.99999])
def test_students_quantile_is_that_of_scipy_for_any_degrees_of_freedom(
    freedom: int, confidence: float
):
    """A sum over 10^12 terms would not end."""
    expected = stats.t.ppf((1 + confidence) / 2, freedom)
    assert student_quantile(confidence, freedom) == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("count", [1, 2, 5, 6, 8, 9, 12, 16, 31])
def test_medians_have_the_narrowest_order_statistics_of_95_percent(count: int):
    """The number of values below the true median is binomial with even chances."""
    found = median_interval(torch.arange(count).float())
    assert found.value == (count - 1) / 2
    assert found.low + found.high == count - 1

    def coverage(rank: int) -> float:
        return 1 - 2 * float(stats.binom.cdf(rank, count, 0.5))

    rank = round(found.low)
    assert rank == 0 or coverage(rank) >= 0.95
    assert coverage(rank + 1) < 0.95


def test_a_median_does_not_see_what_a_few_values_are():
    values = torch.tensor([3.0, 1.0, 2.0, 5.0, 4.0, 6.0, 8.0, 7.0, 1e30])
    assert median_interval(values) == (5, 2, 8)
    with pytest.raises(ValueError, match="at least 1 value"):
        median_interval(values[:0])


def test_no_bound_lies_beyond_what_the_ratio_can_be():
    lengths = torch.tensor([3.0, 50.0, 9.0, 20.0, 4.0, 5.0, 30.0, 8.0, 60.0])
    accepted = lengths * torch.tensor([1, 0.9, 1, 1, 0.2, 1, 1, 0.9, 1])
    free = ratio_interval((accepted, lengths))
    cut = ratio_interval((accepted, lengths), most=1.0)
    assert free.high > 1
    assert cut == (free.value, free.low, 1.0)


def test_units_without_spread_make_a_point_and_one_unit_tells_nothing_of_the_spread():
    interval = ratio_interval((torch.full((9,), 3), torch.full((9,), 4)))
    assert interval == (0.75, 0.75, 0.75)
    assert ratio_interval((torch.zeros(9), torch.ones(9))) == (0, 0, 0)
    one = torch.tensor([3.0]), torch.tensor([4.0])
    assert ratio_interval(one) == (0.75, 0.0, math.inf)
    assert ratio_interval(one, most=1.0) == (0.75, 0.0, 1.0)


def test_units_that_are_all_zero_are_no_units():
    tops, bottoms = torch.tensor([0.0, 0.0, 2.0]), torch.tensor([0.0, 0.0, 4.0])
    assert ratio_interval((tops, bottoms)) == (0.5, 0.0, math.inf)
    tops, bottoms = simulated_units(generator(6), 12)
    empty = torch.zeros(5, dtype=torch.float64)
    padded = torch.cat([tops, empty]), torch.cat([bottoms, empty])
    assert ratio_interval(padded) == ratio_interval((tops, bottoms))


@pytest.mark.parametrize(
    ("tops", "bottoms", "said"),
    [
        (torch.zeros(0), torch.zeros(0), "no units to take a ratio of"),
        (torch.ones(3), torch.zeros(3), "no units to take a ratio of"),
        (torch.ones(3), torch.ones(2), "wanted 2 vectors of one length"),
        (torch.ones(3, 2), torch.ones(3, 2), "wanted 2 vectors of one length"),
        (torch.tensor([2.0, -1.0]), torch.ones(2), "numbers of 0 or more"),
    ],
)
def test_nothing_to_divide_is_an_error(tops: Tensor, bottoms: Tensor, said: str):
    with pytest.raises(ValueError, match=said):
        ratio_interval((tops, bottoms))


@pytest.mark.parametrize(("events", "value"), [(0.0, 0.0), (10.0, 1.0)])
def test_counts_that_are_equal_by_chance_make_no_point(events: float, value: float):
    """No token of 16 texts is rejected, or every one: one text in five may still differ."""
    tokens_N = torch.full((16,), 10.0)
    found = ratio_interval((torch.full((16,), events), tokens_N), most=1.0, counted=True)
    unseen = 1 - 0.025 ** (1 / 16)
    low, high = (0.0, unseen) if value == 0 else (1 - unseen, 1.0)
    assert found == pytest.approx((value, low, high))


def test_counts_are_those_of_the_drawn_units_and_drawn_once(monkeypatch: pytest.MonkeyPatch):
    """By numpy from the same numbers."""
    monkeypatch.setattr(bootstrap, "_PICKS_AT_ONCE", 70)  # of 140
    bootstrap.resample_counts.cache_clear()
    picks_RN = torch.randint(7, (20, 7), generator=generator(0)).numpy()
    expected_RN = [np.bincount(row_N, minlength=7) for row_N in picks_RN]
    assert np.array_equal(bootstrap.resample_counts(7, 20).numpy(), expected_RN)
    assert bootstrap.resample_counts(7, 20) is bootstrap.resample_counts(7, 20)
    bootstrap.resample_counts.cache_clear()
