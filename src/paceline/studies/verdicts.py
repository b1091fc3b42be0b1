"""Verdicts on claims, with error rates that hold for all claims of a paper and all looks.

A claim is decided as soon as its interval decides it; else more examples are drawn, until the looks
end. Each look uses an equal part of the claim's error rate, and each claim an equal part of its
paper's (Bonferroni), so that the probability of any wrong verdict is at most the error rate,
whatever the dependence. tests/statistical/test_sequential_claims.py simulates it.

A wrong verdict is: `holds` though the effect is not positive, `does not hold` though an effect that
matters is there, or `too small to matter here` though it matters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

from paceline.core.bootstrap import LEAST_UNITS, Interval
from paceline.errors import UsageError
from paceline.studies.claim_file import Dominance, FrontierTest, Paired
from paceline.studies.dominance import DominanceEffect, dominance_effect
from paceline.studies.evidence import Effect, paired_effect
from paceline.studies.frontier_evidence import FrontierEffect, frontier_effect

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.studies.claim_file import Claim, ClaimFile, Expected
    from paceline.studies.rows import StudyRow

Verdict = Literal["holds", "does not hold", "too small to matter here", "undecided", "not measured"]
HOLDS, FAILS, SMALL = "holds", "does not hold", "too small to matter here"
UNDECIDED, UNMEASURED = "undecided", "not measured"
DECIDED = (HOLDS, FAILS, SMALL)
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
            return _paired(claim, claim.test, paired_effect(claim.test, rows, tail), command)
        case FrontierTest():
            return _frontier(claim, claim.test, frontier_effect(claim.test, rows, tail), command)
        case Dominance():
            return _dominance(claim, claim.test, dominance_effect(claim.test, rows, tail), command)


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
        verdict, reason = UNDECIDED, f"not in {against[0]}"
    elif verdict == UNDECIDED:
        reason = "the interval contains several verdicts"
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

    strict = [verdict_of(pair.strict, test.matters, test.expect) for pair in effect.pairs]
    if FAILS in strict:
        failing = [number for number, verdict in enumerate(strict) if verdict == FAILS]
        worst = min(failing, key=lambda number: effect.pairs[number].strict.high)
        return finding(worst, FAILS, "", strict=True)
    weakest = min(range(len(strict)), key=lambda number: effect.pairs[number].interval.low)
    own = [verdict_of(pair.interval, test.matters, test.expect) for pair in effect.pairs]
    if effect.num_missing:
        return finding(
            weakest,
            UNDECIDED,
            f"{effect.num_missing} pairs are not measured, or have no cost in common",
        )
    open_pairs = [number for number, verdict in enumerate(own) if verdict in (UNDECIDED, FAILS)]
    if open_pairs:
        return finding(open_pairs[0], UNDECIDED, "the interval contains several verdicts")
    return finding(weakest, SMALL if SMALL in own else HOLDS, "")


def _dominance(
    claim: Claim, test: Dominance, effect: DominanceEffect | None, command: str
) -> Finding:
    if effect is None:
        return _unmeasured(claim, command)
    against, above = effect.against, effect.above
    verdict: Verdict = UNDECIDED
    reason = "the interval contains several verdicts"
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


def _unmeasured(claim: Claim, command: str, reason: str = "") -> Finding:
    return Finding(claim, UNMEASURED, None, None, None, 0, reason or _UNMEASURED, command)
