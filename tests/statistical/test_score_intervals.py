"""Coverage of intervals of mean scores near 0 and 1, and of ratios of two mean scores.

For scores of 0 and 1 the bounds are known in closed form (Clopper and Pearson 1934: quantiles of
beta distributions), so their coverage is summed exactly over the binomial distribution.
"""

from __future__ import annotations

import functools
import math

import pytest
import torch
from scipy import stats
from torch import Tensor

from paceline.core.bootstrap import Interval, ratio_interval, student_quantile
from paceline.core.bounded_means import bounded_mean_interval, bounded_ratio_interval

ACCURACIES = (0.0, 0.02, 0.5, 0.98, 1.0)


def seeded(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@functools.cache
def of_right_answers(right: int, count: int) -> Interval:
    return bounded_mean_interval((torch.arange(count) < right).double())


def student(right: int, count: int) -> Interval:
    """The mutant: no width if all answers are right."""
    scores_N = (torch.arange(count) < right).double()
    mean = float(scores_N.mean())
    half = student_quantile(0.95, count - 1) * float(scores_N.std()) / count**0.5
    return Interval(mean, mean - half, mean + half)


def coverage(accuracy: float, count: int, interval) -> float:
    """Probability that the interval holds the accuracy, exactly."""
    return sum(
        stats.binom.pmf(right, count, accuracy)
        for right in range(count + 1)
        if (found := interval(right, count)).low <= accuracy + 1e-9
        and found.high >= accuracy - 1e-9
    )


@pytest.mark.parametrize("count", [8, 16, 64])
@pytest.mark.parametrize("accuracy", ACCURACIES)
def test_the_interval_of_an_accuracy_covers_it(accuracy, count):
    assert coverage(accuracy, count, of_right_answers) >= 0.95


@pytest.mark.parametrize(("count", "most"), [(8, 0.16), (16, 0.28), (64, 0.75)])
def test_students_interval_of_a_high_accuracy_does_not(count, most):
    assert coverage(0.98, count, student) < most


@pytest.mark.parametrize("right", [0, 1, 5, 15, 16])
def test_of_right_and_wrong_answers_it_is_the_exact_interval(right):
    """Of the draws 100 are beyond a bound, so the standard error of its tail is a tenth of it."""
    found = of_right_answers(right, 16)
    assert found.value == right / 16
    assert found.low == 0 or stats.beta.cdf(found.low, right, 17 - right) == about(0.025)
    assert found.high == 1 or stats.beta.sf(found.high, right + 1, 16 - right) == about(0.025)
    assert (found.low == 0, found.high == 1) == (right == 0, right == 16)


def about(tail: float) -> object:
    return pytest.approx(tail, rel=0.4)


def rare_losses(shape: tuple[int, int], rng: torch.Generator) -> Tensor:
    """Scores of 1, of which 1 in 20 loses up to 0.2: mean 0.995."""
    lost = torch.rand(shape, generator=rng) < 0.05
    return 1 - lost * 0.2 * torch.rand(shape, generator=rng)


def overlaps(shape: tuple[int, int], rng: torch.Generator) -> Tensor:
    """Scores such as ROUGE: most are low, few are high, mean 0.25."""
    return torch.rand(shape, generator=rng) ** 3


@pytest.mark.parametrize(("draw", "mean"), [(rare_losses, 0.995), (overlaps, 0.25)])
@pytest.mark.parametrize("count", [8, 16, 64])
def test_the_interval_of_other_scores_covers_their_mean(draw, mean, count):
    """200 samples; if it covers 98%, fewer than 95% of them are covered once in 200 seeds."""
    rng = seeded(2)
    found = [bounded_mean_interval(scores_N) for scores_N in draw((200, count), rng)]
    assert sum(one.low <= mean <= one.high for one in found) / 200 >= 0.95


@pytest.mark.parametrize("count", [8, 24, 64])
@pytest.mark.parametrize("accuracy", [0.5, 0.95])
def test_the_interval_of_a_relative_quality_covers_it(accuracy, count):
    """200 pairs of accuracies that share two answers of three, of equal mean: the ratio is 1.

    The mutant is the studentised bootstrap, which has no width where all answers are alike.
    """
    rng = seeded(3)
    covered, by_mutant = 0, 0
    for _ in range(200):
        shared = torch.rand(count, generator=rng) < 2 / 3
        target = torch.rand(count, generator=rng) < accuracy
        own = torch.where(shared, target, torch.rand(count, generator=rng) < accuracy)
        if not target.any():
            target[0] = True
        found = bounded_ratio_interval(own.double(), target.double())
        covered += found.low <= 1 <= found.high
        ones = torch.ones(count)
        mutant = ratio_interval((own.double(), ones), (ones, target.double()))
        by_mutant += mutant.low < mutant.high and mutant.low <= 1 <= mutant.high
    assert covered / 200 >= 0.95
    assert accuracy < 0.9 or count > 24 or by_mutant / 200 < 0.9


@pytest.mark.parametrize("count", [8, 24, 64])
def test_the_interval_of_a_relative_overlap_covers_it(count):
    """200 pairs of scores up to 0.6, most of them low, that share two answers of three."""
    rng = seeded(5)
    covered = 0
    for _ in range(200):
        shared = torch.rand(count, generator=rng) < 2 / 3
        target, own = (0.6 * overlaps((1, count), rng)[0] for _ in range(2))
        found = bounded_ratio_interval(torch.where(shared, target, own), target)
        covered += found.low <= 1 <= found.high
    assert covered / 200 >= 0.95


def test_equal_scores_leave_room_for_rare_differences():
    """24 equal pairs: with probability 0.975, a difference in 1 - 0.025^(1/24) would have shown."""
    scores_N = torch.ones(24)
    found = bounded_ratio_interval(scores_N, scores_N)
    rare = 1 - 0.025 ** (1 / 24)
    assert found.value == 1
    assert found.low == pytest.approx(1 - rare, abs=0.02)
    assert found.high == pytest.approx(1 / (1 - rare), abs=0.02)


def test_smaller_tails_give_wider_intervals_at_the_exact_rate():
    """No loss in 500 answers, at a tail of 3.3e-4: the exact bound is tail^(1/500)."""
    tail = 3.3e-4
    found = bounded_mean_interval(torch.ones(500), confidence=1 - 2 * tail)
    assert math.log(found.low) * 500 == pytest.approx(math.log(tail), rel=0.05)


@pytest.mark.parametrize("values", [[], [0.5, 1.01], [-0.1], [math.nan]])
def test_values_beyond_the_bounds_are_refused(values):
    with pytest.raises(ValueError, match="wanted"):
        bounded_mean_interval(torch.tensor(values))
