"""Verdicts by intervals, worked out by hand, and which gamma a verdict is about."""

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from paceline.core.bootstrap import Interval, median_interval, product_interval
from paceline.measure import latency
from paceline.measure.latency import PassCosts, candidates, num_choosing
from paceline.measure.measurement import (
    MeasureConfig,
    Measurement,
    measure_models,
    paired_difference,
)
from paceline.measure.results import disturbance, gamma_of
from paceline.measure.verdict import (
    Verdict,
    best_code,
    decide,
    decide_by_expected,
    decide_served,
    needed_acceptance,
    next_step,
)
from paceline.results.figures import FIGURES
from paceline.results.row import Row
from support.fakes import TableModel
from support.results import gamma_row, result_row

ALPHA = Interval(0.5, 0.45, 0.55)


def row(gamma: int, speedup: float = 1.0, drafted: float | None = None) -> Row:
    """A block costs two target passes."""
    return gamma_row(gamma, 2.0 * speedup, drafted_per_block=drafted or gamma)


def expected(gamma: int, speedup: float, low: float, high: float) -> Row:
    """With these bounds, by an error of the costs alone."""
    bounds = {"block_cost": (2.0 * speedup / high, 2.0 * speedup / low)}
    return row(gamma, speedup).model_copy(update={"bounds": bounds})


def within(gamma: int, speedup: float, error: float) -> Row:
    """With an error in percent of the logarithm."""
    low, high = (speedup * math.exp(sign * error / 100) for sign in (-1, 1))
    return expected(gamma, speedup, low, high)


def by_expected(*rows: Row) -> Verdict:
    return decide_by_expected(ALPHA, rows)


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
    verdict = by_expected(expected(3, value, low, high))
    assert (verdict.word, verdict.exit_code) == (word, code)
    assert (verdict.go, verdict.decided) == (word == "GO", word != "UNDECIDED")
    assert verdict.includes_one == (word == "UNDECIDED")
    served = decide_served(found, row(3, value), "vllm")
    assert (served.word, served.exit_code) == (word, code)
    assert f"measured {value:.2f}x" in served.reason
    assert "in vllm at gamma 3" in served.reason
    assert served.reason.endswith("raise num_prompts") == (word == "UNDECIDED")


@pytest.mark.parametrize("ends", [(0.02, 0.96), (1.1, 5.2)])
def test_timings_that_differ_as_on_no_idle_machine_decide_nothing(ends: tuple[float, float]):
    value = sum(ends) / 2
    served = decide_served(Interval(value, *ends), row(3, 1.0), "vllm")
    for verdict in (served, by_expected(expected(3, value, *ends))):
        assert (verdict.word, verdict.exit_code) == ("UNDECIDED", 3)
        assert verdict.reason.endswith("the timings differ too much from each other")


def test_go_is_about_a_gamma_that_is_shown_to_gain():
    """Not about a faster one that may lose; NO-GO needs every gamma to lose."""
    sure, unsure, slow = within(3, 1.1, 5), within(5, 1.2, 25), within(1, 0.9, 5)
    found = by_expected(slow, sure, unsure)
    assert (found.gamma, found.go) == (3, True)
    assert by_expected(within(5, 1.2, 5), sure).gamma == 5
    assert by_expected(slow, unsure).word == "UNDECIDED"
    found = by_expected(slow, within(2, 0.85, 30))
    assert (found.gamma, found.word) == (2, "UNDECIDED")
    assert by_expected(slow).word == "NO-GO"


def test_the_best_of_several_gammas_needs_a_larger_gain():
    """7% of 95% are 9.6% of 99.3%, the confidence of one of seven."""
    alone, others = within(3, 1.08, 7.0), [within(gamma, 0.5, 7.0) for gamma in range(4, 10)]
    assert by_expected(alone).go
    found = by_expected(alone, *others)
    assert (found.word, found.gamma) == ("UNDECIDED", 3)
    low = 1.08 * math.exp(-0.07 * 2.690 / 1.960)  # normal quantiles
    assert (
        f"expected 1.08x (1.01 to 1.16) at gamma 3: with an allowance for the best of 7 gammas its "
        f"lower limit is {low:.2f}"
    ) in found.reason


def test_timed_requests_have_the_interval_of_their_row():
    alone = [1.0 + 0.1 * (number % 3) for number in range(12)]
    sums = {"target_seconds": alone, "target_tokens": [9] * 12}
    requests = result_row(sums | {"seconds": [1.0] * 12, "tokens": [9] * 12}, gamma=3)
    speedup = FIGURES["speedup"].measure(requests)
    found = decide(ALPHA, row(3), requests)
    assert found.go
    words = f"measured {speedup.value:.2f}x ({speedup.low:.2f} to {speedup.high:.2f}) at gamma 3"
    assert found.reason == f"{words}; acceptance 0.500 is near the break-even 0.500"
    disturbed = decide(ALPHA, row(3), requests, disturbed=True)
    assert disturbed.reason == f"{words}; acceptance 0.500"
    below = decide(Interval(0.1, 0.05, 0.15), row(3), requests)
    assert "acceptance 0.100 is below the break-even 0.500" in below.reason
    slow = requests.model_copy(update={"sums": requests.sums | {"seconds": (1.1,) * 12}})
    why = ", which leaves out prompts and the work between passes"
    for alpha, added in ((Interval(0.6, 0.55, 0.65), why), (ALPHA, "")):
        found = decide(alpha, row(3), slow)
        assert found.word == "UNDECIDED"
        side = "above" if added else "near"
        assert f"is {side} the break-even 0.500{added}" in found.reason
    few = decide(ALPHA, row(3), requests.only(range(7)))
    assert few.word == "TOO FEW"
    assert "set timed_prompts=8 or more" in few.reason


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
    _, low, high = rounds(31).errors[2]
    found = median_interval(torch.linspace(1, 2, 31))
    assert (low * 1.5, high * 1.5) == pytest.approx((found.low, found.high))
    # the range of n values misses the median with probability 2^(1 - n)
    assert 2 in rounds(6).errors
    assert rounds(5).bounds_of_cost(2, 2.0) is None


def test_the_break_even_has_the_error_of_a_whole_block():
    """1 + x + x^2 = cost: x is (sqrt(4 cost - 3) - 1) / 2."""
    errors = {2: Interval(1.0, 0.8, 2.1)}
    costs = PassCosts(1.0, 0.2, {2: 0.4}, {2: 1.2}, errors=errors)
    found = needed_acceptance(costs.priced(row(2, drafted=1.0)))
    low = (math.sqrt(4 * 1.6 * 0.8 - 3) - 1) / 2
    assert found == pytest.approx(((math.sqrt(3.4) - 1) / 2, low, 1.0)), "none pays 3.36 passes"


def test_costs_without_an_interval_say_how_many_rounds_they_need():
    verdict = by_expected(row(3, 2.0))
    assert verdict.word == "UNDECIDED"
    assert verdict.reason.endswith("the costs have no interval; set pass_repeats=6 or more")


def test_the_costs_of_a_block_count_as_far_as_it_drafts():
    """A block of 4 costs 2 passes, half of a block 1.5; +10% is 2.2 and 1.6."""
    for in_full, cost, more in ((True, 2.0, 2.2), (False, 1.5, 1.6)):
        errors = {4: Interval(1.0, 0.9, 1.1)}
        costs = PassCosts(1.0, 0.1, {4: 0.5}, {4: 1.5}, errors=errors, drafts_in_full=in_full)
        found = costs.priced(row(4, 1.0, drafted=2.0))
        assert found.totals["block_cost"] == cost
        assert found.bounds["block_cost"] == pytest.approx((2 * cost - more, more))
        speedup = FIGURES["expected_speedup"].measure(found)
        assert speedup == pytest.approx((2 / cost, 2 / more, 2 / (2 * cost - more)))


@pytest.mark.parametrize(
    ("codes", "wanted"), [([0, 3], 0), ([1, 0], 0), ([1, 1], 1), ([1, 3], 3), ([3, 3], 3)]
)
def test_verdicts_without_go_are_undecided_unless_all_are_no_go(codes: list[int], wanted: int):
    assert best_code(codes) == wanted


# target passes per block of gamma 1 to 6 and 8, as `measure` recorded them: on an idle machine with
# a sampling and a greedy target, and beside other programs
IDLE = (
    (1.143, 1.283, 1.366, 1.559, 1.719, 1.939, 2.367),
    (1.120, 1.270, 1.502, 1.743, 1.975, 2.202, 2.756),
)
BUSY = (0.92, 1.09, 1.43, 1.44, 6.39, 1.61, 9.80)


def fault(*costs: float) -> str:
    pairs = zip((1, 2, 3, 4, 5, 6, 8), costs, strict=False)
    return disturbance([gamma_row(gamma, needed_block_efficiency=cost) for gamma, cost in pairs])


def test_recorded_costs_of_an_idle_machine_are_not_called_disturbed():
    assert [fault(*costs) for costs in IDLE] == ["", ""]
    # the thresholds: 0.9 target passes, and 1.5 times a longer block
    assert not fault(0.91, 1.49, 1.0)
    assert fault(0.89, 1.0)
    assert fault(1.0, 1.51, 1.0)


def test_recorded_costs_of_a_busy_machine_are_called_disturbed():
    words = fault(*BUSY)
    assert "a block of gamma 5 takes 4.0 times as long as one of gamma 6" in words  # 6.39 / 1.61
    assert words.endswith("stop other programs and run again")
    assert "gamma 1 takes 0.14 of the time" in fault(0.136, *IDLE[0][1:])
    verified_fast = {"needed_block_efficiency": 1.0, "block_cost_ratio": 0.797}
    assert "gamma 2 takes 0.80 of the time" in disturbance([gamma_row(2, **verified_fast)])


@pytest.mark.parametrize(
    ("speedup", "break_even", "trained", "said"),
    [
        ((1.2, 1.1, 1.3), 0.4, 0.6, "try longer blocks: --gammas 4,6,8"),
        (  # 1.2 (0.3 / 0.2)^2
            (1.2, 0.9, 1.5),
            0.4,
            0.6,
            "measure more prompts: --num-prompts 48 --timed-prompts 48; if the speedup stays near",
        ),
        ((0.91, 0.87, 1.01), 0.7, math.nan, "at gamma 4 it needs an acceptance above 0.700"),
        (  # 1.2 (0.11 / 0.01)^2 is 145
            (1.01, 0.9, 1.12),
            0.4,
            0.6,
            "align the draft longer (paceline align), or serve without it: a speedup this near 1 "
            "is decided by more than 320 prompts",
        ),
        # beside other programs, of nine requests
        ((0.8, 0.36, 6.91), 0.4, 0.6, "stop other programs and run again"),
        ((5.2, 1.02, 1.6e16), 0.4, 0.6, "stop other programs and run again"),
        ((0.8, 0.7, 0.9), 0.7, math.nan, "at gamma 4 it needs an acceptance above 0.700"),
        ((0.8, 0.7, 0.9), 0.7, 0.6, "on the text of its training it was 0.600, so the prompts"),
        ((0.8, 0.7, 0.9), 0.4, 0.6, "make a smaller draft"),
        ((0.8, 0.7, 0.9), None, 0.6, "make a smaller draft"),
    ],
)
def test_a_verdict_names_the_next_step(
    speedup: tuple[float, float, float], break_even: float | None, trained: float, said: str
):
    found = Interval(*speedup)
    totals = {} if break_even is None else {"break_even_acceptance": break_even}
    rows = [gamma_row(4).model_copy(update={"totals": totals})]
    go, decided = found.low > 1, not found.low <= 1 <= found.high
    verdict = Verdict(go=go, decided=decided, includes_one=not decided, gamma=4, reason="why")
    options = "--target t --draft d --prompts p"
    step = partial(next_step, verdict, ALPHA, speedup=found, trained=trained, options=options)
    assert said in step(rows, most_drafted=62, timed=16)
    if said.startswith("try longer"):
        verified = f"paceline verify {options} --self-test"
        assert step([*rows, gamma_row(8)], most_drafted=62, timed=16) == verified
        assert step(rows, most_drafted=7, timed=16) == verified, "8 do not fit"
    if said.startswith("make") and break_even:
        totals = {"break_even_acceptance": 0.3}
        shorter = [gamma_row(2).model_copy(update={"totals": totals}), *rows]
        assert "try shorter blocks, such as --gammas 2" in step(shorter, most_drafted=9, timed=16)
    if said.startswith("measure"):
        assert step(rows, most_drafted=62, timed=0) == "give the costs an interval: " + (
            "--pass-repeats 6"
        )


def test_where_drafts_may_be_sampled_the_next_step_says_so():
    rows = [gamma_row(4).model_copy(update={"totals": {"break_even_acceptance": 0.4}})]
    sampled = "; or let the engine sample its drafts: measure without --draft-temperature"
    for word, speedup in (("NO-GO", (0.8, 0.7, 0.9)), ("UNDECIDED", (1.0, 0.9, 1.1))):
        verdict = Verdict(
            go=False, decided=word == "NO-GO", includes_one=word != "NO-GO", gamma=4, reason="why"
        )
        assert verdict.word == word
        step = partial(next_step, verdict, ALPHA, rows, Interval(*speedup), math.nan, "")
        plain = step(most_drafted=62, timed=16)
        assert step(most_drafted=62, timed=16, may_sample=True) == plain + sampled
    few = Verdict(go=False, decided=False, gamma=4, reason="why")
    assert (
        next_step(
            few,
            ALPHA,
            rows,
            Interval(1, 0.9, 1.1),
            math.nan,
            "",
            most_drafted=62,
            timed=4,
            may_sample=True,
        )
        == ""
    )


def test_an_open_interval_of_timed_requests_whose_ends_differ_twofold_is_measured_again():
    """One of twelve requests was stopped for seconds: 1.01 (0.44 to 1.23), later 1.21."""
    rows = [gamma_row(1).model_copy(update={"totals": {"break_even_acceptance": 0.06}})]
    verdict = Verdict(go=False, decided=False, includes_one=True, gamma=1, reason="why")
    step = partial(next_step, verdict, ALPHA, rows, trained=math.nan, options="", most_drafted=62)
    stalled, varied = Interval(1.01, 0.44, 1.23), Interval(1.01, 0.7, 1.35)
    assert step(speedup=stalled, timed=16).startswith("stop other programs and run again")
    assert not step(speedup=varied, timed=16).startswith("stop other programs")
    # without timed requests the spread is that of the texts
    assert not step(speedup=stalled, timed=0).startswith("stop other programs")


def test_an_allowance_for_the_best_of_several_gammas_is_named():
    open_question = Verdict(go=False, decided=False, includes_one=True, gamma=4, reason="why")
    rows = [gamma_row(gamma) for gamma in (1, 2, 4)]
    speedup = Interval(1.17, 1.09, 1.24)
    how = {"most_drafted": 62, "timed": 16}
    step = next_step(open_question, ALPHA, rows, speedup, math.nan, "", **how)
    assert step.startswith("the best of 3 gammas may gain by chance; measure more prompts: ")
    assert "align" not in step, "the speedup is above 1"


def test_nothing_is_concluded_from_disturbed_costs():
    rows = [expected(2, 1.5, 1.4, 1.6)]
    assert decide_by_expected(ALPHA, rows).word == "GO"
    found = decide_by_expected(ALPHA, rows, disturbed=fault(*BUSY))
    assert (found.word, found.exit_code) == ("UNDECIDED", 3)
    assert "stop other programs" in found.reason


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


EXPECTED = FIGURES["expected_speedup"]
PROMPTS = [[number // 25, number // 5 % 5, number % 5] for number in range(64)]


@pytest.mark.parametrize(
    ("expected", "wanted"),
    [
        ({1: 1.0}, [1]),
        ({1: 1.0, 2: 1.1}, [2, 1]),
        ({1: 1.0, 2: 1.1, 3: 1.2}, [3, 2, 1]),
        # a block of half the length is far enough away to win where drafting is dearer than thought
        ({1: 1.0, 2: 1.1, 3: 1.2, 4: 1.3, 5: 1.4, 6: 1.5, 8: 1.6}, [8, 6, 4]),
        ({1: 1.5, 2: 1.4, 3: 1.2, 4: 1.1}, [1, 2, 3]),
    ],
)
def test_the_two_best_and_a_shorter_one_are_candidates(
    expected: dict[int, float], wanted: list[int]
):
    rows = [gamma_row(gamma, 2.0 * speedup) for gamma, speedup in expected.items()]
    assert [gamma_of(row) for row in candidates(rows)] == wanted


def test_few_requests_are_all_for_the_verdict():
    found = {count: num_choosing(count) for count in (1, 8, 9, 10, 16, 32, 64)}
    assert found == {1: 0, 8: 0, 9: 0, 10: 2, 16: 4, 32: 8, 64: 8}


class Clock:
    """A target pass takes 10 seconds, a draft pass 1, but more in a text than timed alone."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, draft_s: int) -> None:
        tables = torch.full((2, 5, 5), 0.1)
        tables[:, range(5), [1, 2, 3, 4, 0]] = 0.6
        tables[1] = 0.85 * tables[1] + 0.03
        self.target, self.draft = (TableModel(table) for table in tables)
        monkeypatch.setattr(latency, "_now", self.now)
        self.draft_s = draft_s
        drafting = {gamma: float(gamma) for gamma in range(1, 9)}
        self.costs = PassCosts(10.0, 1.0, drafting, dict.fromkeys(drafting, 10.0))
        monkeypatch.setattr(latency.PassTimer, "costs", lambda _: self.costs)

    def now(self, *_: object) -> float:
        return 10 * self.target.num_passes + self.draft_s * self.draft.num_passes

    def measure(self, timed_prompts: int = 32, seed: int = 0) -> Measurement:
        counts = {"num_prompts": 64, "timed_prompts": timed_prompts, "max_new_tokens": 40}
        config = MeasureConfig(
            target="t", draft="d", prompts="p.txt", pass_repeats=1, seed=seed, **counts
        )
        return measure_models(self.target, self.draft, PROMPTS, config)


def expected_best(found: Measurement) -> int:
    return gamma_of(max(found.blocks, key=EXPECTED.value))


def test_a_wrong_prediction_is_put_right_by_timing(monkeypatch: pytest.MonkeyPatch):
    """Drafting takes five times what its passes took alone: gamma 8 loses, half of it gains."""
    clock = Clock(monkeypatch, draft_s=5)
    found = clock.measure()
    assert found.requests is not None
    best, chosen = expected_best(found), gamma_of(found.requests)
    rate = FIGURES["decoding_tokens_per_s"]
    tried = {gamma_of(row): rate.value(row) for row in found.tried}
    assert chosen < best
    assert tried[chosen] > tried[best]
    gains = found.figure("speedup", found.requests).value > 1
    assert found.best_gamma == (chosen if gains else 0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_luck_with_a_few_texts_does_not_choose(monkeypatch: pytest.MonkeyPatch, seed: int):
    """Blocks cost what was expected; four requests alone give tau within 10% or so."""
    found = Clock(monkeypatch, draft_s=1).measure(timed_prompts=16, seed=100 * seed)
    assert found.requests is not None
    expected = {gamma_of(row): EXPECTED.value(row) for row in found.blocks}
    assert expected[gamma_of(found.requests)] > 0.995 * max(expected.values())


def test_requests_that_chose_are_not_among_those_that_are_reported(monkeypatch: pytest.MonkeyPatch):
    clock, asked = Clock(monkeypatch, draft_s=1), list[tuple[int, tuple[int, ...], int]]()
    original = latency.time_request

    def spy(decoder, prompt, max_new_tokens, seed):
        asked.append((getattr(decoder, "gamma", 0), tuple(prompt), seed))
        return original(decoder, prompt, max_new_tokens, seed)

    monkeypatch.setattr(latency, "time_request", spy)
    found = clock.measure(timed_prompts=16)
    assert found.requests is not None
    assert len(found.requests.units) == 12
    assert [row.totals["num_requests"] for row in found.tried] == [4, 4, 2]
    # 3 + 3 + 2 + 2 to choose, then 12 pairs: two more than 16 pairs take
    assert len(asked) == 34
    assert {gamma for gamma, _, _ in asked[10:]} == {0, gamma_of(found.requests)}
    for part in (1, 2):  # neither a prompt nor a seed is used for both
        assert not {one[part] for one in asked[:10]} & {one[part] for one in asked[10:]}


@pytest.mark.slow
def test_every_gamma_is_tried_where_the_texts_fill_the_context(monkeypatch: pytest.MonkeyPatch):
    clock = Clock(monkeypatch, draft_s=5)
    seconds = {gamma: 5.0 * gamma for gamma in range(1, 9)}
    clock.costs = replace(clock.costs, drafting_s=seconds)
    tried = list(map(gamma_of, clock.measure(timed_prompts=16).tried))
    assert len(tried) == 3
    clock.target.max_length = 3 + 40
    assert list(map(gamma_of, clock.measure(timed_prompts=16).tried)) == tried


def test_few_requests_time_the_expected_best_alone(monkeypatch: pytest.MonkeyPatch):
    found = Clock(monkeypatch, draft_s=5).measure(timed_prompts=8)
    assert found.requests is not None
    assert found.tried == []
    assert len(found.requests.units) == 8
    assert gamma_of(found.requests) == expected_best(found)
