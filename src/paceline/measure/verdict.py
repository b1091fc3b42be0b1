"""Verdicts on a draft (GO, NO-GO, UNDECIDED, TOO FEW, NOT TIMED), with a reason in one sentence."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from paceline.config import StrictModel
from paceline.core.bootstrap import LEAST_UNITS, Interval, least_values, log_distance
from paceline.measure.expected_speed import confidence_of_low

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.measure.expected_speed import ExpectedSpeed
    from paceline.measure.results import AcceptanceRow, GammaRow, IntervalRow, SpeedRow

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


def judge(acceptance: AcceptanceRow, best: GammaRow, speed: SpeedRow) -> Verdict:
    """GO if the whole interval of the measured speedup is above 1, NO-GO if it is below.

    UNDECIDED if it includes 1, TOO FEW with fewer than 8 requests (`core.bootstrap.LEAST_UNITS`).
    """
    count, found = speed.num_requests, speed.speedup
    if count < LEAST_UNITS:
        measured = f"measured {found.value:.2f}x at gamma {speed.gamma}"
        return _too_few(measured, count, "request", "timed_prompts")
    times, _ = _times_needed(found, found, _EXACT)
    if times - 1 > _MOST_TIMES:
        advice = _out_of_reach(found, "timed_prompts and num_prompts")
    else:
        more = _about(count * (times - 1))
        advice = (
            f"about {more:,} more requests would decide at this speedup (raise timed_prompts and "
            "num_prompts)"
        )
    words = f"measured {{}} at gamma {speed.gamma}"
    return _by_interval(words, found, _standing(acceptance, best), advice)


def not_timed(acceptance: AcceptanceRow, architecture: str) -> Verdict:
    """The verdict on a pair with a model of this architecture, whose blocks cannot be timed."""
    alpha = acceptance.expected_acceptance.value
    reason = (
        f"acceptance {alpha:.3f}; {architecture} keeps a state that cannot be rolled back, so "
        "blocks cannot be timed here: give the costs of an engine as --costs"
    )
    return Verdict(go=False, decided=False, timed=False, reason=reason)


def judge_expected(
    acceptance: AcceptanceRow,
    gammas: Sequence[ExpectedSpeed],
    pass_repeats: int,
    engine: str = "",
    remark: str = "",
) -> tuple[ExpectedSpeed, Verdict]:
    """As `judge`, by the expected speedups of all gammas; see `expected_speed` for the intervals.

    GO if some gamma's whole interval is above 1, NO-GO if every gamma's is below. TOO FEW with
    fewer than 8 texts. `engine`: whose costs were used; empty: passes were timed `pass_repeats`
    times here. `remark`: on the engine's costs.

    Returns:
        The gamma of the verdict: the fastest of those that support it. And the verdict.
    """
    best = max(gammas, key=lambda one: (one.speedup.low > 1, one.speedup.high >= 1, one.speedup[0]))
    count, found = acceptance.num_prompts, best.speedup
    where = f"{f' in {engine}' if engine else ''} at gamma {best.row.gamma}"
    if count < LEAST_UNITS:
        return best, _too_few(f"expected {found.value:.2f}x{where}", count, "text", "num_prompts")
    standing = _standing(acceptance, best.row)
    if engine:
        tau = best.row.block_efficiency
        word, needed = _side(1.0, found), tau / found.value
        standing = f"{tau:.2f} tokens per target call are {word} the break-even {needed:.2f}"
        standing = f"{standing}; {remark}" if remark else standing
    repeats = None if engine else pass_repeats
    advice = _more_measurements(best, count, repeats, confidence_of_low(len(gammas)))
    return best, _by_interval(f"expected {{}}{where}", found, standing, advice)


def _more_measurements(
    best: ExpectedSpeed, count: int, pass_repeats: int | None, confidence: float
) -> str:
    """What would decide the expected speedup. `pass_repeats`: None for the costs of an engine."""
    if not math.isfinite(best.by_costs.high):
        if pass_repeats is None:
            return "the engine's costs have no interval; measure them with more rounds"
        return f"the costs have no interval; set pass_repeats={least_values(confidence)} or more"
    prompts, rounds = _times_needed(best.speedup, best.by_texts, best.by_costs)
    if max(prompts, rounds) - 1 > _MOST_TIMES:
        settings = "num_prompts" if pass_repeats is None else "num_prompts and pass_repeats"
        return _out_of_reach(best.speedup, settings)
    wanted: list[str] = []
    if prompts > 1:
        more = _about(count * (prompts - 1))
        wanted.append(f"about {more:,} more prompts (num_prompts={count + more})")
    if rounds > 1:
        wanted.append(
            f"{math.ceil(rounds)} times the rounds and starts of the engine in its costs"
            if pass_repeats is None
            else f"pass_repeats={_about(pass_repeats * rounds)}"
        )
    alone = best.by_costs.low * best.speedup.value <= 1 <= best.by_costs.high * best.speedup.value
    reason = "the error of the costs alone includes 1: " if alone else ""
    return f"{reason}{' and '.join(wanted)} would decide at this speedup"


def _times_needed(
    speedup: Interval | IntervalRow, sampled: Interval | IntervalRow, costs: Interval
) -> tuple[float, float]:
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


def _out_of_reach(speedup: Interval | IntervalRow, settings: str) -> str:
    largest = max(speedup.high - 1, 1 - speedup.low)
    if largest > _WIDE:
        return f"the interval is too wide to tell how much would decide (raise {settings})"
    return f"the speedup is within {largest:.1%} of 1"


def _about(count: float) -> int:
    """Rounded up to two digits."""
    unit = 10 ** max(0, math.floor(math.log10(max(count, 1))) - 1)
    return math.ceil(max(count, 1) / unit) * unit


def _by_interval(
    template: str, speedup: Interval | IntervalRow, standing: str, advice: str
) -> Verdict:
    low, high = speedup.low, speedup.high
    figure = template.format(f"{speedup.value:.2f}x ({low:.2f} to {high:.2f})")
    if low > 1:
        return Verdict(go=True, reason=f"{figure}; {standing}")
    if high < 1:
        return Verdict(go=False, reason=f"{figure}, slower than no draft; {standing}")
    reason = f"{figure}: the interval includes 1; {standing}; {advice}"
    return Verdict(go=False, decided=False, includes_one=True, reason=reason)


def _standing(acceptance: AcceptanceRow, best: GammaRow) -> str:
    alpha, needed = acceptance.expected_acceptance, best.break_even_acceptance
    if needed is None:
        return f"no acceptance breaks even at gamma {best.gamma}"
    word = _side(needed, alpha)
    return f"acceptance {alpha.value:.3f} is {word} the break-even {needed:.3f}"


def _side(border: float, figure: Interval | IntervalRow) -> str:
    """Where the whole interval of a figure lies."""
    if figure.low > border:
        return "above"
    return "below" if figure.high < border else "near"


def _too_few(figure: str, count: int, unit: str, setting: str) -> Verdict:
    units = f"{count} {unit}{'s' if count != 1 else ''}"
    return Verdict(
        go=False,
        decided=False,
        reason=(
            f"{figure} on {units}, but a verdict needs {LEAST_UNITS}; set {setting}={LEAST_UNITS} "
            "or more and give as many prompts"
        ),
    )
