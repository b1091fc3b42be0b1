"""Verdicts on claims, with error rates that hold for all claims of a paper and all looks.

Claims are judged after each look at more examples. No more are drawn once no claim of the study is
undecided, or the looks end. Each look uses an equal part of the claim's error rate, and each claim
an equal part of its paper's (Bonferroni), so that the probability of any wrong verdict is at most
the error rate, whatever the dependence. tests/statistical/test_sequential_claims.py simulates it.

Intervals are over examples, given the models: how much other seeds of training would change is not
in them.

A wrong verdict is: `holds` though the effect is not positive, `does not hold` though an effect that
matters is there, or `too small to matter here` though it matters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

from paceline.core.bootstrap import LEAST_UNITS, Interval
from paceline.errors import UsageError
from paceline.studies.claim_file import Correlation, Dominance, FrontierTest, Paired
from paceline.studies.correlation import CorrelationEffect, correlation_effect
from paceline.studies.dominance import DominanceEffect, dominance_effect
from paceline.studies.evidence import Effect, each_effect, paired_effect
from paceline.studies.frontier_evidence import FrontierEffect, frontier_effect

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.studies.claim_file import Claim, ClaimFile, Expected
    from paceline.studies.rows import StudyRow

Verdict = Literal["holds", "does not hold", "too small to matter here", "undecided", "not measured"]
HOLDS, FAILS, SMALL = "holds", "does not hold", "too small to matter here"
UNDECIDED, UNMEASURED = "undecided", "not measured"
DECIDED = (HOLDS, FAILS, SMALL)
_SEVERAL = "the interval contains several verdicts"
_UNMEASURED = f"a side has no rows, or fewer than {LEAST_UNITS} examples"


class Finding(NamedTuple):
    """The verdict on a claim.

    Attributes:
        effect: The effect that decided: of the whole claim, or of its weakest pair.
        first, second: Figures of the sides.
        num_units: Number of examples, or of seeds.
        reason: Why the claim is undecided or not measured; or the pair that decided.
        command: A command that made the rows; empty if there are none.
    """

    claim: Claim
    verdict: Verdict
    effect: Interval | None
    first: float | None
    second: float | None
    num_units: int
    reason: str
    command: str


def judge(file: ClaimFile, rows: Sequence[StudyRow], looks: dict[str, int]) -> list[Finding]:
    """The verdict on each claim. `looks`: the planned number of looks of each study."""
    found: list[Finding] = []
    for claim in file.claims:
        own = [row for row in rows if row.study == claim.study]
        if own and claim.study not in looks:
            raise UsageError(
                f"the number of looks of study {claim.study} is not known; judge claims where its "
                "file is in configs/studies"
            )
        tail = file.level[claim.paper] / looks.get(claim.study, 1) / 2
        found.append(judge_one(claim, own, tail))
    return found


def judge_one(claim: Claim, rows: Sequence[StudyRow], tail: float) -> Finding:
    """The verdict on one claim; `tail`: the probability on either side of an interval.

    Rows that do not have what the claim names are no measurement; the reason says what is missing.
    """
    try:
        return _judged(claim, rows, tail)
    except UsageError as error:
        return _unmeasured(claim, rows[0].source.command if rows else "", str(error))


def _judged(claim: Claim, rows: Sequence[StudyRow], tail: float) -> Finding:
    command = rows[0].source.command if rows else ""
    match claim.test:
        case Paired():
            if claim.test.each:
                return _each(claim, claim.test, each_effect(claim.test, rows, tail), command)
            return _paired(claim, claim.test, paired_effect(claim.test, rows, tail), command)
        case FrontierTest():
            return _frontier(claim, claim.test, frontier_effect(claim.test, rows, tail), command)
        case Dominance():
            return _dominance(claim, claim.test, dominance_effect(claim.test, rows, tail), command)
        case Correlation():
            effect = correlation_effect(claim.test, rows, tail)
            return _correlation(claim, claim.test, effect, command)


def verdict_of(interval: Interval, matters: float, expected: Expected) -> Verdict:
    """The verdict of one interval of an effect."""
    low, high = interval.low, interval.high
    match expected:
        case "more":
            if -matters < low and high < matters:
                return SMALL
            if low > 0:
                return HOLDS
            return FAILS if high < matters else UNDECIDED
        case "less":
            return verdict_of(Interval(-interval.value, -high, -low), matters, "more")
        case "no_less":
            if low > -matters:
                return HOLDS
            return FAILS if high < -matters else UNDECIDED
        case "same":
            if -matters < low and high < matters:
                return HOLDS
            return FAILS if low > matters or high < -matters else UNDECIDED


def _paired(claim: Claim, test: Paired, effect: Effect | None, command: str) -> Finding:
    if effect is None:
        return _unmeasured(claim, command)
    verdict, reason = verdict_of(effect.interval, test.matters, test.expect), ""
    sign = {"more": 1, "less": -1}.get(test.expect, 0)
    against = [name for name, value in effect.strata.items() if sign * value <= 0]
    if verdict == HOLDS and sign and against:
        reason = f"on average, but not in {against[0]}"
    elif verdict == UNDECIDED:
        reason = _SEVERAL
    return Finding(
        claim,
        verdict,
        effect.interval,
        effect.first,
        effect.second,
        effect.num_units,
        reason,
        command,
    )


def _frontier(
    claim: Claim, test: FrontierTest, effect: FrontierEffect | None, command: str
) -> Finding:
    """Holds if it holds for every pair; does not hold if it does not for any of them."""
    if effect is None:
        return _unmeasured(claim, command)

    def finding(number: int, verdict: Verdict, reason: str, *, strict: bool = False) -> Finding:
        pair = effect.pairs[number]
        interval = pair.strict if strict else pair.interval
        name = f"{pair.first} against {pair.second}"
        why = f"{name}: {reason}" if reason else name
        figures = pair.first_value, pair.second_value
        return Finding(claim, verdict, interval, *figures, effect.num_units, why, command)

    intervals = [(pair.interval, pair.strict) for pair in effect.pairs]
    number, verdict, strict = _of_all(intervals, test.matters, test.expect)
    if effect.num_missing and verdict == HOLDS:
        missing = f"{effect.num_missing} pairs are not measured, or have no cost in common"
        return finding(number, UNDECIDED, missing)
    return finding(number, verdict, _SEVERAL if verdict == UNDECIDED else "", strict=strict)


def _each(
    claim: Claim,
    test: Paired,
    effects: list[tuple[str, Effect, Effect]] | None,
    command: str,
) -> Finding:
    """Holds if it holds in every stratum; does not hold if it does not in any of them."""
    if effects is None:
        return _unmeasured(claim, command)
    intervals = [(own.interval, strict.interval) for _, own, strict in effects]
    number, verdict, is_strict = _of_all(intervals, test.matters, test.expect)
    name, own, strict = effects[number]
    effect = strict if is_strict else own
    reason = f"{name}: {_SEVERAL}" if verdict == UNDECIDED else name
    figures = effect.first, effect.second
    return Finding(claim, verdict, effect.interval, *figures, effect.num_units, reason, command)


def _of_all(
    intervals: Sequence[tuple[Interval, Interval]], matters: float, expected: Expected
) -> tuple[int, Verdict, bool]:
    """The verdict on a claim that is about all of several effects.

    It holds if each holds by its own interval. One effect alone decides that it does not hold, or
    is too small to matter, so these need the intervals for a claim on any of them.

    Returns:
        The number of the effect that decides, the verdict, and whether by the second interval.
    """
    own, strict = (
        [verdict_of(pair[which], matters, expected) for pair in intervals] for which in (0, 1)
    )

    def support(number: int) -> float:
        """How far the effect is in favour of the claim."""
        value = intervals[number][0].value
        return -value if expected == "less" else value

    for verdict in (FAILS, SMALL):
        if verdict in strict:
            deciding = [number for number, one in enumerate(strict) if one == verdict]
            return min(deciding, key=support), verdict, True
    if any(verdict != HOLDS for verdict in own):
        return next(n for n, verdict in enumerate(own) if verdict != HOLDS), UNDECIDED, False
    return min(range(len(own)), key=support), HOLDS, False


def _dominance(
    claim: Claim, test: Dominance, effect: DominanceEffect | None, command: str
) -> Finding:
    if effect is None:
        return _unmeasured(claim, command)
    against, above = effect.against, effect.above
    verdict: Verdict = UNDECIDED
    reason = _SEVERAL
    if against.low > test.matters:
        verdict, reason = FAILS, ""
    elif against.high < test.matters and above.high < test.matters:
        verdict, reason = SMALL, ""
    elif against.high < test.matters and effect.gain.low > 0:
        verdict, reason = HOLDS, ""
    shown = against if verdict == FAILS else above
    return Finding(
        claim, verdict, shown, above.value, against.value, effect.num_units, reason, command
    )


def _correlation(
    claim: Claim, test: Correlation, effect: CorrelationEffect | None, command: str
) -> Finding:
    if effect is None:
        return _unmeasured(claim, command)
    found = effect.interval
    above = Interval(*(one - test.than for one in found))
    verdict = verdict_of(above, test.matters, test.expect)
    reason = f"{effect.num_drafts} drafts"
    if verdict == UNDECIDED:
        reason += f": {_SEVERAL}"
    return Finding(claim, verdict, above, found.value, test.than, effect.num_units, reason, command)


def _unmeasured(claim: Claim, command: str, reason: str = "") -> Finding:
    return Finding(claim, UNMEASURED, None, None, None, 0, reason or _UNMEASURED, command)
