"""What an undecided verdict asks for, worked out by hand, and which gamma a verdict is about."""

import math
from dataclasses import dataclass

import pytest
import torch

from paceline.core.bootstrap import Interval, median_interval, product_interval
from paceline.measure.engine_costs import StepCosts
from paceline.measure.latency import PassCosts
from paceline.measure.results import gamma_of
from paceline.measure.verdict import (
    ExpectedSpeed,
    Verdict,
    best_code,
    decide,
    decide_by_expected,
    decide_served,
    expected_speeds,
)
from paceline.results.row import Row
from support.results import gamma_row

ALPHA = Interval(0.5, 0.45, 0.55)


def row(gamma: int, speedup: float = 1.0, drafted: float | None = None) -> Row:
    """A block costs two target passes."""
    return gamma_row(gamma, 2.0 * speedup, drafted_per_block=drafted or gamma)


def expected(gamma: int, speedup: float, texts: float, costs: float) -> ExpectedSpeed:
    """Errors in percent of a logarithm, equal on both sides."""
    parts = [
        Interval(value, value * math.exp(-error), value * math.exp(error))
        for value, error in ((speedup, texts / 100), (1.0, costs / 100))
    ]
    return ExpectedSpeed(row(gamma, speedup), product_interval(*parts), *parts)


def timed(speedup: float, error: float, count: int = 32) -> Verdict:
    low, high = (speedup * math.exp(sign * error / 100) for sign in (-1, 1))
    return decide(ALPHA, row(3), Interval(speedup, low, high), count)


def by_expected(*found: ExpectedSpeed, repeats: int = 31, engine: str = "") -> tuple[int, Verdict]:
    costs = PassCosts(1.0, 0.1, {}, {}, block_ratios={3: [2.0] * repeats})
    if engine:
        costs = StepCosts.of_blocks(1.0, {3: 2.0}, engine=engine)
    best, verdict = decide_by_expected(ALPHA, found, costs)
    return gamma_of(best.row), verdict


@dataclass(frozen=True)
class Costs(PassCosts):
    """With this error of a block."""

    error: tuple[float, float] = (1.0, 1.0)

    def error_of_block(self, gamma: int, confidence: float) -> tuple[float, float]:
        return self.error


def costs_with(low: float, high: float, *, in_full: bool = False) -> Costs:
    drafting_s, verifying_s = (dict.fromkeys(range(9), seconds) for seconds in (0.5, 1.5))
    return Costs(1.0, 0.1, drafting_s, verifying_s, drafts_in_full=in_full, error=(low, high))


@pytest.mark.parametrize(
    ("low", "high", "word", "code"),
    [
        (1.02, 1.2, "GO", 0),
        (0.5, 0.98, "NO-GO", 1),
        (0.98, 1.2, "UNDECIDED", 3),
        (0.8, 1.0, "UNDECIDED", 3),
        (1.0, 1.2, "UNDECIDED", 3),
    ],
)
def test_a_verdict_needs_the_whole_interval_on_one_side(
    low: float, high: float, word: str, code: int
):
    value = (low + high) / 2
    found = Interval(value, low, high)
    _, verdict = by_expected(ExpectedSpeed(row(3, value), found, found, Interval(1, 1, 1)))
    assert (verdict.word, verdict.exit_code) == (word, code)
    assert (verdict.go, verdict.decided) == (word == "GO", word != "UNDECIDED")
    assert verdict.includes_one == (word == "UNDECIDED")
    served = decide_served(found, row(3, value), "vllm")
    assert (served.word, served.exit_code) == (word, code)
    assert f"measured {value:.2f}x" in served.reason
    assert "in vllm at gamma 3" in served.reason


@pytest.mark.parametrize("speedup", [1.04, 1 / 1.04])
def test_the_requests_that_it_asks_for_bring_the_bound_to_1(speedup: float):
    """log 1.04 is 3.92%; an error of 8% of 32 requests needs (8 / 3.92)^2 = 4.16 times as many."""
    verdict = timed(speedup, 8.0)
    assert verdict.word == "UNDECIDED"
    assert "about 110 more requests would decide" in verdict.reason  # 101.3, in two digits
    assert timed(speedup, 8.0 * (32 / (32 + 110)) ** 0.5).decided
    assert not timed(speedup, 8.0 * (32 / (32 + 90)) ** 0.5).decided


def test_the_prompts_that_it_asks_for_shrink_the_error_of_the_texts_alone():
    """Of 3.92% the costs leave (3.92^2 - 2^2)^0.5 = 3.37: 32 (8 / 3.37)^2 = 180 prompts."""
    gamma, verdict = by_expected(expected(3, 1.04, 8.0, 2.0))
    assert gamma == 3
    assert "about 150 more prompts (num_prompts=182) would decide" in verdict.reason
    more = 8.0 * (32 / 182) ** 0.5
    assert by_expected(expected(3, 1.04, more, 2.0))[1].go
    assert "pass_repeats" not in verdict.reason


def test_where_the_costs_alone_leave_1_in_the_interval_passes_must_be_timed_more_often():
    """Half of 3.92%^2 for the costs: 31 (5 / 2.77)^2 = 101; 32 (8 / 2.77)^2 = 266 prompts."""
    _, verdict = by_expected(expected(3, 1.04, 8.0, 5.0))
    assert verdict.reason.endswith(
        "the error of the costs alone includes 1: about 240 more prompts (num_prompts=272) and "
        "pass_repeats=110 would decide at this speedup"
    )
    enough = expected(3, 1.04, 8.0 * (32 / 272) ** 0.5, 5.0 * (31 / 110) ** 0.5)
    assert by_expected(enough)[1].go
    _, verdict = by_expected(expected(3, 1.04, 1.0, 5.0), engine="vllm 0.32.0")
    assert "more prompts" not in verdict.reason
    assert "4 times the rounds and starts of the engine in its costs" in verdict.reason


def test_what_no_number_of_prompts_decides_is_close_to_1():
    """(3 / log 1.002)^2 is 225 times as many."""
    near, at = timed(1.002, 3.0), timed(1.0, 3.0)
    assert near.reason.endswith("; the speedup is within 3.3% of 1")  # 1.002 exp(0.03)
    assert at.reason.endswith("; the speedup is within 3.0% of 1")
    assert by_expected(expected(3, 1.002, 3, 0))[1].reason.endswith(
        "; the speedup is within 3.3% of 1"
    )
    assert "more requests" in timed(1.004, 3.0).reason
    for wide in (timed(1.002, 30.0), by_expected(expected(3, 1.002, 3, 30))[1]):
        assert "the interval is too wide to tell how much would decide (raise " in wide.reason
    assert timed(1.0, math.inf).word == "UNDECIDED"


def test_go_is_about_a_gamma_that_is_shown_to_gain():
    """Not about a faster one that may lose; NO-GO needs every gamma to lose."""
    sure, unsure, slow = expected(3, 1.1, 5, 0), expected(5, 1.2, 25, 0), expected(1, 0.9, 5, 0)
    assert by_expected(slow, sure, unsure)[0] == 3
    assert by_expected(slow, sure, unsure)[1].go
    assert by_expected(expected(5, 1.2, 5, 0), sure)[0] == 5
    assert by_expected(slow, unsure)[1].word == "UNDECIDED"
    wide = expected(2, 0.85, 30, 0)
    assert (by_expected(slow, wide)[0], by_expected(slow, wide)[1].word) == (2, "UNDECIDED")
    assert by_expected(slow)[1].word == "NO-GO"


def test_where_the_acceptance_may_lie_on_either_side_it_is_near_the_break_even():
    found = timed(1.04, 8.0)
    assert "acceptance 0.500 is near the break-even 0.500" in found.reason
    assert found.reason.startswith(
        "measured 1.04x (0.96 to 1.13) at gamma 3: the interval includes"
    )


def test_a_product_of_exact_and_uncertain_factors_has_the_error_of_the_uncertain():
    exact, half = Interval(3.0, 3.0, 3.0), Interval(2.0, 1.0, 8.0)
    assert product_interval(exact, half) == pytest.approx((6.0, 3.0, 24.0))
    assert product_interval(half, half).low == pytest.approx(4 * 2 ** -(2**0.5))
    assert product_interval(half, Interval(1.0, 0.0, math.inf)) == (2.0, 0.0, math.inf)


def rounds(count: int) -> PassCosts:
    """A block costs from 1.0 to 2.0 target passes; each round has a speed of its own."""
    ratios = [1 + number / (count - 1 or 1) for number in range(count)]
    seconds = {("target", 1): [1.0 + number for number in range(count)], ("draft", 1): [1.0]}
    for part in ("drafting", "verifying"):
        pairs = zip(ratios, seconds["target", 1], strict=True)
        seconds[part, 2] = [ratio * target / 2 for ratio, target in pairs]
    return PassCosts.of_rounds(seconds, [2])


def test_the_error_of_a_block_is_that_of_the_median_of_its_rounds():
    costs = rounds(31)
    low, high = costs.error_of_block(2, 0.95)
    found = median_interval(torch.linspace(1, 2, 31))
    assert (low * 1.5, high * 1.5) == pytest.approx((found.low, found.high))
    assert costs.error_of_block(2, 0.99)[1] > high
    # the range of n values misses the median with probability 2^(1 - n)
    assert rounds(6).error_of_block(2, 0.95)[1] < math.inf
    assert rounds(5).error_of_block(2, 0.95) == (0.0, math.inf)
    assert PassCosts.of_parameters(0.1, [2]).error_of_block(2, 0.95) == (0.0, math.inf)


def test_costs_without_an_interval_say_how_many_rounds_they_need():
    found = expected_speeds([row(3, 2.0)], costs_with(0.0, math.inf), seed=0)
    assert found[0].speedup == (2.0, 0.0, math.inf)
    _, verdict = by_expected(*found, repeats=5)
    assert verdict.reason.endswith("the costs have no interval; set pass_repeats=6 or more")
    _, verdict = by_expected(*found, engine="vllm 0.32.0")
    assert verdict.reason.endswith(
        "the engine's costs have no interval; measure them with more rounds"
    )


def test_the_costs_of_a_block_count_as_far_as_it_drafts():
    """A block of 4 costs 2 passes, half of a block 1.5; +10% is 2.2 and 1.6."""
    for in_full, cost, more in ((True, 2.0, 2.2), (False, 1.5, 1.6)):
        half = row(4, 1.0, drafted=2.0)
        costs = costs_with(0.9, 1.1, in_full=in_full)
        (found,) = expected_speeds([half], costs, seed=0)
        assert found.speedup.low == pytest.approx(cost / more)
        assert found.speedup.high == pytest.approx(cost / (2 * cost - more))


@pytest.mark.parametrize(
    ("codes", "wanted"), [([0, 3], 0), ([1, 0], 0), ([1, 1], 1), ([1, 3], 3), ([3, 3], 3)]
)
def test_verdicts_without_go_are_undecided_unless_all_are_no_go(codes: list[int], wanted: int):
    assert best_code(codes) == wanted
