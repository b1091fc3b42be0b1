"""Verdicts on claims, with error rates that hold for all claims of a paper.

Each claim has an equal part of its paper's error rate (Bonferroni), so that the probability of any
wrong verdict is at most the error rate, whatever the dependence.
tests/statistical/test_error_rate_of_claims.py simulates it.

Intervals are over examples, given the models; those of claims on recipes are over runs of training,
too (`studies.seeds`).

A wrong verdict is: `holds`, with or without `but small`, though the effect is not positive; `does
not hold` though it is not negative; or `too small to matter` though it matters. An effect that
holds is `small` if the estimate is below what matters, which has no error rate.

Theorems, identities and results that follow from algebra are checks: they are counted apart, and
have no error rate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

from paceline.core.bootstrap import LEAST_UNITS, Interval
from paceline.errors import UsageError
from paceline.studies.claim_file import (
    Correlation,
    Dominance,
    FrontierTest,
    Paired,
    Pointwise,
)
from paceline.studies.evidence import paired_evidence
from paceline.studies.evidence_of_drafts import check, correlation_effect, dominance_effect
from paceline.studies.evidence_of_frontiers import frontier_evidence

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.results.row import Row
    from paceline.studies.claim_file import Claim, ClaimFile, Expected
    from paceline.studies.evidence import Evidence
    from paceline.studies.evidence_of_drafts import DominanceEffect

Verdict = Literal[
    "holds",
    "holds, but small",
    "does not hold",
    "too small to matter",
    "undecided",
    "no rows yet",
    "no violation",
    "says nothing here",
    "violated",
    "known by algebra",
]
HOLDS, HOLDS_SMALL, FAILS, SMALL = (
    "holds",
    "holds, but small",
    "does not hold",
    "too small to matter",
)
UNDECIDED, UNMEASURED = "undecided", "no rows yet"
CONFIRMED, VACUOUS, VIOLATED, ALGEBRA = (
    "no violation",
    "says nothing here",
    "violated",
    "known by algebra",
)
DECIDED = (HOLDS, HOLDS_SMALL, FAILS, SMALL)
VERDICTS = (*DECIDED, UNDECIDED, UNMEASURED)
"""Verdicts on findings, in the order in which they are shown."""
CHECKS = (CONFIRMED, VACUOUS, VIOLATED, ALGEBRA)
"""Verdicts on theorems, identities and algebra, in their order."""
_UNMEASURED = f"a side has no rows, or fewer than {LEAST_UNITS} examples"


class Finding(NamedTuple):
    """The verdict on a claim.

    Attributes:
        effect: The effect that decided: of the whole claim, or of the part that decided.
        first, second: Figures of the sides.
        num_units: Number of examples, or of positions of a check.
        reason: What the data exclude, which part decided, or why there is no verdict.
        command: A command that made the rows; empty if there are none.
        note: What belongs to the effect: runs of training, overlap of curves, number of drafts.
        earlier: The verdict with the margin that was fixed before any row was known, if another.
        level: The probability of a wrong verdict that the interval has.
    """

    claim: Claim
    verdict: Verdict
    effect: Interval | None
    first: float | None
    second: float | None
    num_units: int
    reason: str
    command: str
    note: str = ""
    earlier: str = ""
    level: float = 0.0

    @property
    def size(self) -> str:
        """Whether the paper's size is in the interval; empty if the two cannot be compared."""
        size = self.claim.size
        if self.effect is None or size.low is None or size.high is None:
            return ""
        if size.low > self.effect.high:
            return "larger than the interval"
        return "smaller than the interval" if size.high < self.effect.low else "in the interval"

    @property
    def effect_text(self) -> str:
        """The effect with its interval; a ratio as a percentage, empty without an effect."""
        if self.effect is None:
            return ""
        form = "+.1%" if getattr(self.claim.test, "compare", "") == "ratio" else "+.3f"
        value, low, high = (format(bound, form) for bound in self.effect)
        return f"{value} ({low} to {high})"

    @property
    def margins(self) -> str:
        """What was known when margin and test were fixed; empty if nothing was."""
        claim = self.claim
        if not claim.known:
            return ""
        text = f"fixed on {claim.fixed}, knowing {claim.known}"
        if claim.earlier is not None:
            verdict = self.earlier or "the same verdict"
            text += f"; with the earlier margin {claim.earlier:g}: {verdict}"
        return text


def judge(file: ClaimFile, rows: Sequence[Row]) -> list[Finding]:
    """The verdict on each claim by the rows of its study."""
    found: list[Finding] = []
    for claim in file.claims:
        own = [row for row in rows if row.study == claim.study]
        level = file.level.get(claim.paper, file.error_rate)
        found.append(judge_one(claim, own, level / 2, rows))
    return found


def judge_one(
    claim: Claim,
    rows: Sequence[Row],
    tail: float,
    everything: Sequence[Row] | None = None,
) -> Finding:
    """The verdict on one claim by the rows of its study.

    `tail`: the probability on either side of an interval. `everything`: rows of all studies, for
    the spread between runs of training.

    Rows that do not have what the claim names are no measurement; the reason says what is missing.
    """
    command = rows[0].source.command if rows else ""
    if claim.awaits:
        return _unmeasured(claim, command, claim.awaits)
    try:
        found = _judged(claim, rows, tail, everything)
    except UsageError as error:
        return _unmeasured(claim, command, str(error))
    if found is None:
        return _unmeasured(claim, command, _UNMEASURED)
    if claim.algebra:
        found = found._replace(verdict=ALGEBRA, reason=claim.algebra)
    if claim.elsewhere:
        unlike = f"not the paper's case: {claim.elsewhere}"
        found = found._replace(reason="; ".join(filter(None, (found.reason, unlike))))
    return found._replace(command=command, level=2 * tail)


def _judged(
    claim: Claim, rows: Sequence[Row], tail: float, everything: Sequence[Row] | None
) -> Finding | None:
    match claim.test:
        case Paired():
            evidence = paired_evidence(claim.test, rows, tail, everything)
        case FrontierTest():
            evidence = frontier_evidence(claim.test, rows)
        case Dominance():
            effect = dominance_effect(claim.test, rows, tail)
            return None if effect is None else _dominance(claim, claim.test, effect)
        case Correlation():
            return _correlation(claim, claim.test, rows, tail)
        case Pointwise():
            return _checked(claim, claim.test, rows)
    return None if evidence is None else _decided(claim, claim.test, evidence, tail)


def verdict_of(interval: Interval, matters: float, expected: Expected) -> Verdict:
    """The verdict of one interval of an effect."""
    low, high = interval.low, interval.high
    match expected:
        case "more":
            if low > 0:
                return HOLDS if interval.value >= matters else HOLDS_SMALL
            if high < 0:
                return FAILS
            return SMALL if high < matters else UNDECIDED
        case "less":
            return verdict_of(_turned(interval), matters, "more")
        case "no_less":
            if low > -matters:
                return HOLDS
            return FAILS if high < -matters else UNDECIDED
        case "same":
            if -matters < low and high < matters:
                return HOLDS
            return FAILS if low > matters or high < -matters else UNDECIDED


def _turned(interval: Interval) -> Interval:
    return Interval(-interval.value, -interval.high, -interval.low)


def in_words(interval: Interval, matters: float, expected: Expected, form: str) -> str:
    """What the data exclude, or what they leave open.

    `form`: the format of effects, such as `.1%`.
    """
    least = f"{100 * matters:g}%" if "%" in form else f"{matters:g}"
    open_ = f"anything from {interval.low:+{form}} to {interval.high:+{form}} is possible"
    verdict = verdict_of(interval, matters, expected)
    if expected in ("no_less", "same"):
        worst = f"a {'loss' if expected == 'no_less' else 'difference'} of {least} or more"
        return {HOLDS: f"{worst} is excluded", FAILS: f"{worst} is there"}.get(verdict, open_)
    word = "gain" if expected == "more" else "fall"
    is_small = -matters < interval.low and interval.high < matters
    words: dict[Verdict, str] = {
        HOLDS: "",
        HOLDS_SMALL: f"a {word}, estimated below {least}",
        SMALL: f"no {'difference' if is_small else word} of {least} or more"
        + (", either way" if is_small else f"; {open_}"),
        FAILS: "the difference has the other sign",
    }
    return words.get(verdict, open_)


def form_of(claim: Claim) -> str:
    """The format of the claim's effects: percent for ratios."""
    return ".1%" if getattr(claim.test, "compare", "difference") == "ratio" else ".3f"


def _decided(claim: Claim, test: Paired | FrontierTest, evidence: Evidence, tail: float) -> Finding:
    if not evidence.parts:
        return Finding(claim, UNDECIDED, None, None, None, 0, evidence.missing, "")
    part = evidence.part(tail)
    is_less = isinstance(test, Paired) and test.expect == "less"
    expected: Expected = "more" if is_less else test.expect  # parts of `less` are turned
    interval = part.at(tail)
    verdict = verdict_of(interval, test.matters, expected)
    shown = _turned(interval) if is_less else interval
    reason = in_words(shown, test.matters, test.expect, form_of(claim))
    sign = {"more": 1, "less": -1}.get(test.expect, 0)
    against = [name for name, value in part.strata.items() if sign * value <= 0]
    if verdict in (HOLDS, HOLDS_SMALL) and sign and against:
        reason = "; ".join(filter(None, (reason, f"on average, but not in {against[0]}")))
    if evidence.missing and not (verdict == FAILS and evidence.rank == len(evidence.parts)):
        verdict, reason = UNDECIDED, evidence.missing
    name = part.name if len(evidence.parts) > 1 or evidence.missing else ""
    if name and evidence.rank == len(evidence.parts) > 1:
        name = f"least of {len(evidence.parts)}: {name}"
    earlier = ""
    if claim.earlier is not None:
        other = verdict_of(interval, claim.earlier, expected)
        earlier = other if other != verdict else ""
    return Finding(
        claim,
        verdict,
        shown,
        part.first,
        part.second,
        part.num_units,
        "; ".join(filter(None, (name, reason))),
        "",
        part.note,
        earlier,
    )


def _dominance(claim: Claim, test: Dominance, effect: DominanceEffect) -> Finding:
    against, above = effect.against, effect.above
    verdict: Verdict = UNDECIDED
    if against.low > test.matters:
        verdict = FAILS
    elif against.high < test.matters and effect.gain.low > 0:
        verdict = HOLDS if above.value >= test.matters else HOLDS_SMALL
    elif against.high < test.matters and above.high < test.matters:
        verdict = SMALL
    shown = against if verdict == FAILS else above
    reason = f"the other way the largest gap is {against.value:.3f}, at most {against.high:.3f}"
    return Finding(claim, verdict, shown, above.value, against.value, effect.num_units, reason, "")


def _correlation(
    claim: Claim, test: Correlation, rows: Sequence[Row], tail: float
) -> Finding | None:
    effect = correlation_effect(test, rows, tail)
    if effect is None:
        return None
    above = Interval(*(one - test.than for one in effect.interval))
    verdict = verdict_of(above, test.matters, test.expect)
    reason = in_words(above, test.matters, test.expect, ".3f")
    return Finding(
        claim,
        verdict,
        above,
        effect.interval.value,
        test.than,
        effect.num_units,
        reason,
        "",
        effect.note,
    )


def _checked(claim: Claim, test: Pointwise, rows: Sequence[Row]) -> Finding | None:
    found = check(test, rows)
    if found is None:
        return None
    verdict: Verdict = VIOLATED if found.violations else CONFIRMED
    reason = f"{found.violations:,} violations in {found.num_places:,}"
    if verdict == CONFIRMED and test.empty is not None and found.second <= test.empty:
        verdict = VACUOUS
        reason += f"; the bound is {found.second:.2f} on average, which is always true"
    return Finding(claim, verdict, None, found.first, found.second, found.num_places, reason, "")


def _unmeasured(claim: Claim, command: str, reason: str) -> Finding:
    return Finding(claim, UNMEASURED, None, None, None, 0, reason, command)
