"""Verdicts on a draft (GO, NO-GO, UNDECIDED, TOO FEW, NOT TIMED), with a reason in one sentence.

Without timed requests, a verdict is on the expected speedups of all gammas. GO needs one gamma
above 1, so the error rate of a lower bound, 2.5%, is divided by the number of gammas (Bonferroni).
NO-GO needs all below 1, so an upper bound keeps its 2.5%. Either verdict is wrong in at most 2.5%
of measurements.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from paceline.config import StrictModel
from paceline.core.bootstrap import (
    LEAST_UNITS,
    Interval,
    least_values,
    log_distance,
    product_interval,
    ratio_interval,
)
from paceline.measure.latency import about
from paceline.measure.results import gamma_of
from paceline.results.figures import FIGURES
from paceline.rng import named_generator

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.measure.latency import PassCosts
    from paceline.results.row import Row

_ERROR_RATE = 0.05
# A verdict that needs this many times the measurements made, and more, is out of reach.
_MOST_TIMES = 100
# Difference from 1 that is not worth calling close to it.
_WIDE = 0.1
_EXACT = Interval(1.0, 1.0, 1.0)


class Verdict(StrictModel):
    """Whether to serve the draft, and why.

    Attributes:
        go: True if serving with the draft is faster.
        decided: False without a verdict: the interval includes 1, too few requests were measured,
            or blocks cannot be timed. Then `go` is false.
        timed: False if blocks of these models cannot be timed.
        includes_one: True if there is no verdict because the interval of the speedup includes 1.
        reason: One sentence.
    """

    go: bool
    decided: bool = True
    timed: bool = True
    includes_one: bool = False
    reason: str

    def __str__(self) -> str:
        return f"{self.word}: {self.reason}"

    @property
    def word(self) -> str:
        """`GO`, `NO-GO`, `UNDECIDED`, `TOO FEW` or `NOT TIMED`."""
        if self.decided:
            return "GO" if self.go else "NO-GO"
        if self.includes_one:
            return "UNDECIDED"
        return "TOO FEW" if self.timed else "NOT TIMED"

    @property
    def exit_code(self) -> int:
        """Of the command line: 0 GO, 1 NO-GO, 3 no verdict."""
        if not self.decided:
            return 3
        return 0 if self.go else 1


def best_code(codes: Sequence[int]) -> int:
    """Of several verdicts: 0 if any is GO, 1 if all are NO-GO, else 3."""
    return 0 if 0 in codes else max(codes)


class ExpectedSpeed(NamedTuple):
    """Expected speedup of a gamma with its interval, and the two parts of its error.

    Attributes:
        row: Of the scored texts, with blocks of this gamma.
        speedup: With the errors of the texts and of the costs together.
        by_texts: The speedup with the error of tau alone.
        by_costs: 1 with the relative error of the costs alone; unbounded if they have no interval.
    """

    row: Row
    speedup: Interval
    by_texts: Interval
    by_costs: Interval


def confidence_of_low(num_gammas: int) -> float:
    """Confidence of the interval that has the lower bound of each gamma."""
    return 1 - _ERROR_RATE / num_gammas


def expected_speeds(
    rows: Sequence[Row],
    costs: PassCosts,
    *,
    seed: int,
    num_resamples: int = 4000,
) -> list[ExpectedSpeed]:
    """The expected speedup of each gamma.

    Args:
        rows: Of the scored texts, for each gamma.
        costs: Of blocks, with their errors.
        seed: Of the bootstrap over texts.
        num_resamples: Of the bootstrap.
    """
    confidences = confidence_of_low(len(rows)), 1 - _ERROR_RATE
    speeds: list[ExpectedSpeed] = []
    for row in rows:
        (of_texts,) = FIGURES["block_efficiency"].columns(row)
        value = FIGURES["expected_speedup"].value(row)
        by_texts, by_costs = list[Interval](), list[Interval]()
        for confidence in confidences:
            rng = named_generator(seed, "expected speedup")
            tau = ratio_interval(
                *of_texts, rng=rng, confidence=confidence, num_resamples=num_resamples
            )
            scale = value / tau.value
            by_texts.append(Interval(value, tau.low * scale, tau.high * scale))
            blocks = gamma_of(row), row.totals["drafted_per_block"]
            by_costs.append(costs.error_of_speed(*blocks, confidence))
        parts = [Interval(wide.value, wide.low, other.high) for wide, other in (by_texts, by_costs)]
        speeds.append(ExpectedSpeed(row, product_interval(*parts), *parts))
    return speeds


def decide(acceptance: Interval, best: Row, speedup: Interval, count: int) -> Verdict:
    """GO if the whole interval of the measured speedup is above 1, NO-GO if it is below.

    UNDECIDED if it includes 1, TOO FEW with fewer than 8 requests (`core.bootstrap.LEAST_UNITS`).
    `best`: the row of the scored texts, with blocks of the gamma of the `count` requests.
    """
    where, standing = f"at gamma {gamma_of(best)}", _standing(acceptance, best)
    return _by_requests(speedup, count, where, standing, ("timed_prompts", "num_prompts"))


def decide_served(speedup: Interval, counted: Row, engine: str) -> Verdict:
    """As `decide`, of whole requests in an engine; `counted`: the row of its counters."""
    where = f"in {engine} at gamma {gamma_of(counted)}"
    standing = f"{FIGURES['block_efficiency'].value(counted):.2f} tokens per target call"
    return _by_requests(speedup, len(counted.units), where, standing, ("num_prompts",))


def _by_requests(
    speedup: Interval, count: int, where: str, standing: str, settings: tuple[str, ...]
) -> Verdict:
    if count < LEAST_UNITS:
        return _too_few(f"measured {speedup.value:.2f}x {where}", count, "request", settings[0])
    times, _ = _times_needed(speedup, speedup, _EXACT)
    raised = " and ".join(settings)
    if times - 1 > _MOST_TIMES:
        advice = _out_of_reach(speedup, raised)
    else:
        more = about(count * (times - 1))
        advice = f"about {more:,} more requests would decide at this speedup (raise {raised})"
    return _by_interval(f"measured {_words(speedup)} {where}", speedup, standing, advice)


def not_timed(acceptance: Interval, architecture: str) -> Verdict:
    """The verdict on a pair with a model of this architecture, whose blocks cannot be timed."""
    reason = (
        f"acceptance {acceptance.value:.3f}; {architecture} keeps a state that cannot be rolled "
        "back, so blocks cannot be timed here: give the costs of an engine as --costs"
    )
    return Verdict(go=False, decided=False, timed=False, reason=reason)


def decide_by_expected(
    acceptance: Interval, speeds: Sequence[ExpectedSpeed], costs: PassCosts
) -> tuple[ExpectedSpeed, Verdict]:
    """As `decide`, by the expected speedups of all gammas.

    GO if some gamma's whole interval is above 1, NO-GO if every gamma's is below. TOO FEW with
    fewer than 8 texts.

    Returns:
        The gamma of the verdict: the fastest of those that support it. And the verdict.
    """

    def support(speed: ExpectedSpeed) -> tuple[bool, bool, float]:
        return speed.speedup.low > 1, speed.speedup.high >= 1, speed.speedup.value

    best = max(speeds, key=support)
    count, speedup = len(best.row.units), best.speedup
    where = f"{costs.engine and f' in {costs.engine}'} at gamma {gamma_of(best.row)}"
    if count < LEAST_UNITS:
        return best, _too_few(f"expected {speedup.value:.2f}x{where}", count, "text", "num_prompts")
    if costs.engine:
        tau, needed = FIGURES["block_efficiency"].value(best.row), best.row.totals["block_cost"]
        side = _side(1.0, speedup)
        standing = f"{tau:.2f} tokens per target call are {side} the break-even {needed:.2f}"
        standing = f"{standing}; {costs.remark}" if costs.remark else standing
    else:
        standing = _standing(acceptance, best.row)
    advice = _more_measurements(best, count, costs, confidence_of_low(len(speeds)))
    return best, _by_interval(f"expected {_words(speedup)}{where}", speedup, standing, advice)


def _more_measurements(best: ExpectedSpeed, count: int, costs: PassCosts, confidence: float) -> str:
    """What would decide the expected speedup."""
    speedup, by_costs = best.speedup, best.by_costs
    if not math.isfinite(by_costs.high):
        if costs.engine:
            return "the engine's costs have no interval; measure them with more rounds"
        return f"the costs have no interval; set pass_repeats={least_values(confidence)} or more"
    prompts, rounds = _times_needed(speedup, best.by_texts, by_costs)
    if max(prompts, rounds) - 1 > _MOST_TIMES:
        settings = "num_prompts" if costs.engine else "num_prompts and pass_repeats"
        return _out_of_reach(speedup, settings)
    needed: list[str] = []
    if prompts > 1:
        more = about(count * (prompts - 1))
        needed.append(f"about {more:,} more prompts (num_prompts={count + more})")
    if rounds > 1:
        starts = f"{math.ceil(rounds)} times the rounds and starts of the engine in its costs"
        needed.append(
            starts if costs.engine else f"pass_repeats={about(costs.num_rounds * rounds)}"
        )
    alone = by_costs.low * speedup.value <= 1 <= by_costs.high * speedup.value
    reason = "the error of the costs alone includes 1: " if alone else ""
    return f"{reason}{' and '.join(needed)} would decide at this speedup"


def _times_needed(speedup: Interval, sampled: Interval, costs: Interval) -> tuple[float, float]:
    """How many times the prompts and the rounds of timing would move the bound near 1 to 1.

    Both errors shrink with the root of their number. That of the costs must be at most half of the
    variance that the distance to 1 allows.
    """
    to_one = abs(math.log(speedup.value))
    if not to_one:
        return math.inf, math.inf
    by_sample, by_costs = (
        log_distance(part.value, part.low if speedup.value > 1 else part.high)
        for part in (sampled, costs)
    )
    allowed = min(by_costs, to_one / 2**0.5)
    rounds = (by_costs / allowed) ** 2 if by_costs else 1.0
    return max(by_sample**2 / (to_one**2 - allowed**2), 1.0), rounds


def _out_of_reach(speedup: Interval, settings: str) -> str:
    largest = max(speedup.high - 1, 1 - speedup.low)
    if largest > _WIDE:
        return f"the interval is too wide to tell how much would decide (raise {settings})"
    return f"the speedup is within {largest:.1%} of 1"


def _words(speedup: Interval) -> str:
    return f"{speedup.value:.2f}x ({speedup.low:.2f} to {speedup.high:.2f})"


def _by_interval(figure: str, speedup: Interval, standing: str, advice: str) -> Verdict:
    if speedup.low > 1:
        return Verdict(go=True, reason=f"{figure}; {standing}")
    if speedup.high < 1:
        return Verdict(go=False, reason=f"{figure}, slower than no draft; {standing}")
    reason = f"{figure}: the interval includes 1; {standing}; {advice}"
    return Verdict(go=False, decided=False, includes_one=True, reason=reason)


def _standing(acceptance: Interval, best: Row) -> str:
    needed = best.totals.get("break_even_acceptance")
    if needed is None:
        return f"no acceptance breaks even at gamma {gamma_of(best)}"
    side = _side(needed, acceptance)
    return f"acceptance {acceptance.value:.3f} is {side} the break-even {needed:.3f}"


def _side(border: float, figure: Interval) -> str:
    """Where the whole interval of a figure lies."""
    if figure.low > border:
        return "above"
    return "below" if figure.high < border else "near"


def _too_few(figure: str, count: int, unit: str, setting: str) -> Verdict:
    units = f"{count} {unit}{'s' if count != 1 else ''}"
    reason = (
        f"{figure} on {units}, but a verdict needs {LEAST_UNITS}; set {setting}={LEAST_UNITS} "
        "or more and give as many prompts"
    )
    return Verdict(go=False, decided=False, reason=reason)
