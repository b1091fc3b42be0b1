"""Curves of quality against cost, by hand, by another road, and on simulated benches."""

import numpy as np
import pytest
import torch

from paceline.core.bootstrap import Interval
from paceline.core.rule_base import Rule
from paceline.core.rules import Chow, Opt
from paceline.results.comparison import (
    ACCEPTED,
    CALLS_SAVED,
    Comparison,
    Cost,
    Group,
    along,
    compare_curves,
)
from paceline.results.frontier import Frontier
from paceline.results.row import Row
from support.results import ALONE, example, row, steady, with_sums


def cell(rule: Rule, quality: float, rejected: int, calls: int = 5) -> Row:
    return row(rule, [example(quality, calls=calls, examined=10, rejected=rejected)] * 20)


def compared(*cells: Row, cost: Cost = ACCEPTED) -> Comparison | None:
    alone = steady(ALONE, count=len(cells[0].units))
    return compare_curves(Frontier([alone, *cells]), Group("opt"), Group("chow"), cost)


def test_the_effect_is_the_mean_difference_over_the_costs_that_both_reach():
    """Opt: 1 at 0.5, 0.6 at 0.9. Chow: 0.9 at 0.3, 0.5 at 0.7. In common: 0.5 to 0.7.

    Opt falls from 1 to 0.8 there, Chow from 0.7 to 0.5: means 0.9 and 0.6.
    """
    opt = cell(Opt(0.3), 0.6, 1), cell(Opt(0.1), 1.0, 5)
    chow = cell(Chow(0.1), 0.9, 7), cell(Chow(0.2), 0.5, 3)
    found = compared(*opt, *chow)
    assert found is not None
    assert (found.first, found.second) == pytest.approx((0.9, 0.6))
    assert found.difference() == pytest.approx(Interval(0.3, 0.3, 0.3))


def test_target_calls_are_another_cost():
    """Calls saved: Opt 0.5 and 0.1, Chow 0.3, which is half way."""
    opt = cell(Opt(0.1), 1.0, 5, calls=9), cell(Opt(0.3), 0.6, 5, calls=5)
    found = compared(*opt, cell(Chow(0.1), 0.7, 5, calls=7), cost=CALLS_SAVED)
    assert found is not None
    assert found.difference().value == pytest.approx(0.8 - 0.7)


def test_families_without_a_cost_in_common_or_without_cells_are_not_compared():
    opt = cell(Opt(0.1), 1.0, 5), cell(Opt(0.3), 0.9, 4)
    assert compared(*opt, cell(Chow(0.1), 1.0, 3)) is None
    assert compared(*opt) is None
    assert compared(*opt, cell(Chow(0.1), 1.0, 4)) is not None


def test_curves_are_those_of_numpy():
    draws = torch.Generator().manual_seed(2)
    gain_CR, quality_CR = torch.rand(2, 5, 7, generator=draws, dtype=torch.float64)
    gain_CR[3] = gain_CR[1]  # two cells of the same cost
    points_PR = torch.rand(9, 7, generator=draws, dtype=torch.float64)
    found_PR = along(gain_CR, quality_CR, points_PR)
    for resample in range(7):
        order = np.argsort(gain_CR[:, resample].numpy(), kind="stable")
        gains, qualities = (part[:, resample].numpy()[order] for part in (gain_CR, quality_CR))
        expected = np.interp(points_PR[:, resample].numpy(), gains, qualities)
        assert found_PR[:, resample].numpy() == pytest.approx(expected)


@pytest.mark.slow
def test_intervals_cover_the_truth_and_those_of_means_without_costs_do_not():
    """400 benches of 60 examples; both families lie on the line quality = 1 - gain, so 0 is true.

    The standard error of a coverage of 0.95 is 0.011: [0.91, 0.99] is more than three of them away.
    The mutant compares mean qualities of the cells, though the families have other costs.
    """
    draws = torch.Generator().manual_seed(9)
    covered, mutant = 0, 0
    shares = {Opt(0.1): 0.2, Opt(0.2): 0.5, Chow(0.1): 0.3, Chow(0.2): 0.6}
    alone = steady(ALONE, count=60)
    made = [row(rule, [example(calls=5, examined=40)] * 60) for rule in shares]
    for _ in range(400):
        cells = []
        for cell, share in zip(made, shares.values(), strict=True):
            chances = torch.full((60,), 40.0), torch.tensor(1 - share)
            rejected = torch.binomial(*chances, generator=draws).int()
            scores = (torch.rand(60, generator=draws) < 1 - share).double()
            columns = {"rejected": rejected.tolist(), "accepted": (40 - rejected).tolist()}
            cells.append(with_sums(cell, score=scores.tolist(), **columns))
        frontier = Frontier([alone, *cells], num_resamples=500)
        found = compare_curves(frontier, Group("opt"), Group("chow"), ACCEPTED)
        assert found is not None
        covered += found.difference().low <= 0 <= found.difference().high
        qualities_CR = torch.stack([frontier.resampled("relative_quality", c) for c in cells])
        means_R = qualities_CR[:2].mean(0) - qualities_CR[2:].mean(0)
        low, high = means_R[1:].quantile(torch.tensor([0.025, 0.975], dtype=means_R.dtype))
        mutant += bool(low <= 0 <= high)
    assert 0.91 <= covered / 400 <= 0.99
    assert mutant / 400 < 0.91
