"""Figures and choices of a frontier, against sums by hand and against what a resample can be."""

import math
from typing import Any

import pytest

from paceline.core.bootstrap import Interval
from paceline.core.rules import Chow, Diff, Lenient, Lossless, Lossy, Opt
from paceline.decode.draft_policies import Confident
from paceline.decode.strategies import Oracle, ResponseByResponse, Speculative, TokenByToken
from paceline.errors import UsageError
from paceline.results.frontier import Frontier
from paceline.results.row import Row
from support.results import ALONE, example, row, steady


def chow(policy: Any) -> Speculative:
    return Speculative(rule=Chow(0.2), policy=policy)


THREE = row(ALONE, [example(0.5), example(1.0), example(0.0)])


def test_what_came_with_the_prompt_or_in_the_first_block_is_left_out_token_by_token():
    """11 tokens in 1 s, of which 3 came in a first block at 0.2 s; target alone: 10 in 0.9 s."""
    block = example(first_s=0.2, baseline_first_s=0.1, calls=4, first_tokens=3, prefill_tokens=0)
    cell = row(Chow(0.2), [block] * 3)
    found = Frontier([row(ALONE, [example()] * 3), cell])
    assert found.measure("deferral_rate", cell).value == pytest.approx(4 / 11)
    assert found.measure("decoding_speedup", cell).value == pytest.approx((0.9 / 10) / (0.8 / 8))


def test_untimed_examples_count_for_quality_and_rejection_but_not_for_speed():
    cell = row(
        Chow(0.2),
        [
            example(1.0, 0.5, examined=10, rejected=1),
            example(0.0, 99.0, 500, baseline_s=None, examined=10, rejected=9),
            example(1.0, 0.5, examined=20, rejected=0),
        ],
    )
    found = Frontier([THREE, cell])
    assert found.measure("speedup", cell) == Interval(2.0, 2.0, 2.0)
    assert found.measure("quality", cell).value == pytest.approx(2 / 3)
    assert found.measure("rejection_rate", cell).value == pytest.approx(10 / 40)


def test_the_mean_of_two_scores_is_hardly_known():
    """Right and wrong: the exact interval (Clopper and Pearson) is 0.013 to 0.987."""
    cell = row(Chow(0.2), [example(0.0), example(1.0)])
    found = Frontier([row(ALONE, [example(1.0), example(1.0)]), cell])
    assert found.measure("quality", cell) == pytest.approx((0.5, 0.0126, 0.9874), abs=0.005)
    assert sorted(set(found.resampled("quality", cell).tolist())) == [0.0, 0.5, 1.0]


def test_of_one_example_nothing_is_known():
    """Its resamples are all the same: an interval of width 0 would read as certainty."""
    cell = row(Chow(0.2), [example(1.0, 0.5, examined=10, rejected=1)])
    found = Frontier([row(ALONE, [example(1.0)]), cell])
    best = found.fastest([cell], 0.5)
    assert best is not None
    for known in (found.measure("speedup", cell), best.speedup):
        assert (known.low, known.high) == (0.0, math.inf)
    assert found.measure("quality", cell) == pytest.approx((1.0, 0.025, 1.0), abs=0.01)
    assert found.measure("rejection_rate", cell)[1:] == (0.0, 1.0)


def test_all_cells_are_resampled_together():
    """Hard for one is hard for all: a cell that scores as the target equals it in all resamples."""
    examples = [example(1.0), example(0.2), example(0.6), example(0.1)]
    alone, cell = row(ALONE, examples), row(Chow(0.2), examples)
    found = Frontier([alone, cell])
    assert found.measure("quality", cell).low < found.measure("quality", cell).high
    assert found.resampled("relative_quality", cell).tolist() == [1.0] * 2001


def test_a_best_cell_is_chosen_on_one_half_and_measured_on_the_other():
    """Lucky is the fastest on the choosing half alone. Timed and untimed examples are halved."""
    plain = [example(), *[example(baseline_s=None)] * 2] * 10
    halves = Frontier([row(ALONE, plain)]).halves
    places = [set(half.target.units) for half in halves]
    assert places[0] | places[1] == set(range(30))
    assert [half.num_timed for half in halves] == [5, 5]
    once = Frontier([row(ALONE, [example(), *[example(baseline_s=None)] * 4])]).halves
    assert [half.num_timed for half in once] == [1, 1], "a single one is in both"
    lucky = [
        one | {"seconds": 1 / 4 if place in places[0] else 1 / 2, "score": score}
        for place, one in enumerate(plain)
        for score in [1.0 if place in places[0] else 0.9]
    ]
    even = [one | {"seconds": 1 / 3} for one in plain]
    cells = [row(Chow(0.2), even), row(Chow(0.8), lucky)]
    best = Frontier([row(ALONE, plain), *cells]).fastest(cells, 1.0)
    assert best is not None
    assert best.row is cells[1]
    assert (best.speedup.value, best.quality.value) == pytest.approx((2.0, 0.9))


def test_what_no_cell_reaches_is_not_reached():
    alone = steady(ALONE)
    worse, slower = steady(Chow(0.8), 0.9, 3.0), steady(Chow(0.2), 1.0, 0.5)
    found = Frontier([alone, worse, slower])
    assert found.fastest([worse], 1.0) is None
    reached = found.fastest([worse, slower], 1.0)
    assert reached is not None
    assert (reached.row, reached.speedup.value, reached.quality.value) == (slower, 0.5, 1.0)


@pytest.mark.parametrize(("quality", "metric"), [(0.0, "accuracy"), (None, None)])
def test_without_quality_of_the_target_nothing_is_relative_to_it(
    quality: float | None, metric: str | None
):
    """It is always wrong, or the task has no metric: the speed is there."""
    settings = ((ALONE, 1.0), (Chow(0.2), 2.0))
    cells = [steady(one, quality, speed, metric=metric) for one, speed in settings]
    found = Frontier(cells)
    assert found.measure("speedup", cells[1]).value == 2.0
    assert math.isnan(found.measure("quality", cells[1]).value) == (quality is None)
    assert found.fastest(cells[1:], 0.5) is None


def test_the_target_alone_is_the_unit_of_speed_and_of_quality():
    slow = row(ALONE, [example(0.5, 2.0), example(1.0, 3.0), example(0.0, 2.0)])
    found = Frontier([slow])
    assert found.measure("speedup", slow) == Interval(1.0, 1.0, 1.0)
    assert found.measure("relative_quality", slow) == Interval(1.0, 1.0, 1.0)
    assert math.isnan(found.measure("rejection_rate", slow).value)
    assert Frontier([steady(ALONE, 1.0, 0.8)]).against_itself().value == pytest.approx(0.8)


def test_a_lossless_cell_has_the_targets_quality_whatever_luck_its_samples_had():
    unlucky, near = steady(Lossless(), 0.5, 1.4), steady(Chow(0.2), 0.5, 1.6)
    found = Frontier([steady(ALONE), unlucky, near])
    assert found.measure("quality", unlucky).value == 0.5, "measured"
    assert found.measure("relative_quality", unlucky) == Interval(1.0, 1.0, 1.0), "proven"
    reached = found.fastest([unlucky, near], 1.0)
    assert reached is not None
    assert (reached.row, reached.speedup.value) == (unlucky, pytest.approx(1.4))
    assert found.fastest([unlucky], 1.01) is None, "nothing is proven of more than the target's own"


@pytest.mark.parametrize(
    ("strategy", "curve", "place"),
    [
        (ALONE, "autoregressive", ""),
        (Lossless(), "lossless", "gamma 4"),
        (Lossy(0.2), "lossy beta 1.0", "alpha 0.2, gamma 4"),
        (Lossy(0.2, "tuned"), "lossy beta tuned", "alpha 0.2, gamma 4"),
        (Lenient("square", 0.5), "lenient square", "epsilon 0.5, gamma 4"),
        (chow(Confident(0.5)), "chow confident", "alpha 0.2, gamma 4, threshold 0.5"),
        (TokenByToken(alpha=0.2), "token_cascade", "alpha 0.2"),
        (TokenByToken(alpha=0.2, most_drafted=3), "token_cascade", "alpha 0.2, most drafted 3"),
        (ResponseByResponse(alpha=0.2, normalise=True), "sequence_cascade normalised", "alpha 0.2"),
        # the rule of an oracle was neither on its curve's name nor its threshold in the setting
        (Oracle(rule=Diff(0.2)), "oracle_cascade diff", "alpha 0.2"),
        (Oracle(rule=Opt(0.4)), "oracle_cascade opt", "alpha 0.4"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_cell_lies_on_the_curve_of_all_but_its_threshold(strategy, curve, place):
    cell = steady(strategy)
    assert (cell.setting["family"], cell.setting.get("setting", "")) == (curve, place)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([steady(Chow(0.2))], "target alone has no finished cell"),
        ([steady(ALONE), steady(Chow(0.2), count=3)], "a cell has 3 examples, the target alone 20"),
    ],
)
def test_rows_that_are_no_frontier_are_refused(rows: list[Row], said: str):
    with pytest.raises(UsageError, match=said):
        Frontier(rows)
