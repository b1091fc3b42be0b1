"""Verdicts by hand: on intervals, on parts of a claim, on theorems, and the rate of a claim."""

from typing import Any

import pytest

from paceline.config import validate
from paceline.core.bootstrap import Interval
from paceline.errors import ConfigError
from paceline.studies import verdicts
from paceline.studies.claim_file import Claim, ClaimFile
from paceline.studies.evidence import Evidence, Part
from paceline.studies.evidence_of_drafts import CorrelationEffect, DominanceEffect
from paceline.studies.verdicts import Finding, in_words, judge, judge_one, verdict_of
from support.results import claim, study_row

HOLDS, HOLDS_SMALL, FAILS = "holds", "holds, but small", "does not hold"
SMALL, UNDECIDED, UNMEASURED = "too small to matter", "undecided", "no rows yet"
PAIRED = {"kind": "paired", "figure": "quality", "first": {}, "than": 1.0, "matters": 0.1}
DOMINANCE = {
    "kind": "dominance",
    "figure": "quality",
    "first": {"where": {"label": "end"}},
    "second": {"where": {"label": "start"}},
    "matters": 0.1,
}
NAN = float("nan")


@pytest.mark.parametrize(
    ("low", "high", "more", "no_less", "same"),
    [
        (0.2, 0.3, HOLDS, HOLDS, FAILS),
        (0.05, 0.3, HOLDS, HOLDS, UNDECIDED),
        (0.05, 0.08, HOLDS_SMALL, HOLDS, HOLDS),
        (0.01, 0.17, HOLDS_SMALL, HOLDS, UNDECIDED),
        (-0.05, 0.3, UNDECIDED, HOLDS, UNDECIDED),
        (-0.05, 0.05, SMALL, HOLDS, HOLDS),
        (-0.08, -0.05, FAILS, HOLDS, HOLDS),
        (-0.3, 0.05, SMALL, UNDECIDED, UNDECIDED),
        (-0.3, -0.05, FAILS, UNDECIDED, UNDECIDED),
        (-0.3, -0.2, FAILS, FAILS, FAILS),
        (-0.3, 0.3, UNDECIDED, UNDECIDED, UNDECIDED),
        (0.0, 0.3, UNDECIDED, HOLDS, UNDECIDED),
        (NAN, NAN, UNDECIDED, UNDECIDED, UNDECIDED),
    ],
)
def test_an_interval_decides_if_all_of_it_means_the_same(
    low: float, high: float, more: str, no_less: str, same: str
):
    interval = Interval((low + high) / 2, low, high)
    found = [verdict_of(interval, 0.1, expected) for expected in ("more", "no_less", "same")]
    assert found == [more, no_less, same]
    assert verdict_of(Interval(-interval.value, -high, -low), 0.1, "less") == more


@pytest.mark.parametrize(
    ("low", "high", "expected", "words"),
    [
        (0.06, 0.1, "more", ""),
        (0.01, 0.05, "more", "a gain, estimated below 5%"),
        (-0.01, 0.01, "more", "no difference of 5% or more, either way"),
        (-0.119, 0.03, "more", "no gain of 5% or more; anything from -11.9% to +3.0% is possible"),
        (-0.119, -0.03, "more", "the difference has the other sign"),
        (-0.03, 0.119, "less", "no fall of 5% or more; anything from -3.0% to +11.9% is possible"),
        (0.03, 0.119, "less", "the difference has the other sign"),
        (-0.1, 0.1, "more", "anything from -10.0% to +10.0% is possible"),
        (-0.01, 0.1, "no_less", "a loss of 5% or more is excluded"),
        (-0.2, -0.1, "no_less", "a loss of 5% or more is there"),
        (-0.01, 0.01, "same", "a difference of 5% or more is excluded"),
    ],
)
def test_the_words_say_what_the_data_exclude(low: float, high: float, expected: Any, words: str):
    assert in_words(Interval((low + high) / 2, low, high), 0.05, expected, ".1%") == words


def part(low: float, high: float, name: str = "", **strata: float) -> Part:
    """A part whose interval is wider by 0.1 at a smaller tail."""

    def at(tail: float) -> Interval:
        wider = 0.1 if tail < 0.01 else 0.0
        return Interval((low + high) / 2, low - wider, high + wider)

    return Part(name, at, 1.2, 1.0, 20, strata)


def judged(test: dict[str, Any], *parts: Part, missing: str = "", **changes: Any) -> Finding:
    """The verdict if the rows had these effects."""
    evidence = Evidence(parts, len(parts), missing)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verdicts, "paired_evidence", lambda *_: evidence)
        return judge_one(validate(Claim, claim(test, **changes)), [], 0.01)


def test_a_claim_on_a_mean_says_where_it_is_reversed():
    assert judged(PAIRED, part(0.2, 0.4, a=0.3, b=0.3)).reason == ""
    found = judged(PAIRED, part(0.2, 0.4, a=0.7, b=-0.1))
    assert (found.verdict, found.reason) == (HOLDS, "on average, but not in b")
    # the parts of a claim that expects less are turned
    lower = part(0.2, 0.4, a=-0.7, b=0.1)
    found = judged(PAIRED | {"expect": "less"}, lower)
    assert (found.verdict, found.reason) == (HOLDS, "on average, but not in b")
    assert found.effect == pytest.approx(Interval(-0.3, -0.4, -0.2))


@pytest.mark.parametrize(
    ("b", "verdict", "reason"),
    [
        ((0.2, 0.4), HOLDS, "least of 2: b"),
        ((-0.5, -0.3), FAILS, "least of 2: b; the difference has the other sign"),
        ((-0.05, 0.4), UNDECIDED, "least of 2: b; anything from -0.050 to +0.500 is possible"),
        # it fails by its own interval, but not by the one for a claim on any of them
        ((-0.4, 0.05), UNDECIDED, "least of 2: b; anything from -0.400 to +0.150 is possible"),
    ],
)
def test_a_claim_on_all_parts_holds_in_each_or_fails_in_one(
    b: tuple[float, float], verdict: str, reason: str
):
    test = PAIRED | {"each": ["alpha"], "compare": "difference"}
    found = judged(test, part(0.3, 0.6, "a"), part(*b, "b"))
    assert (found.verdict, found.reason) == (verdict, reason)


def test_what_is_missing_prevents_that_a_claim_holds_and_not_that_it_fails():
    missing = "1 of 3 pairs have no verdict: opt against lossy: the curves share 29%"
    found = judged(PAIRED, part(0.3, 0.6, "a"), part(0.2, 0.4, "b"), missing=missing)
    assert (found.verdict, found.reason) == (UNDECIDED, f"least of 2: b; {missing}")
    assert judged(PAIRED, part(-0.6, -0.3, "a"), part(0.2, 0.4, "b"), missing=missing).verdict == (
        FAILS
    )
    nothing = judged(PAIRED, missing=missing)
    assert (nothing.verdict, nothing.effect, nothing.reason) == (UNDECIDED, None, missing)


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [
        (0.1, 0.25, "in the interval"),
        (0.21, 0.35, "in the interval"),
        (0.3, 0.45, "larger than the interval"),
        (0.01, 0.15, "smaller than the interval"),
        (None, None, ""),
    ],
)
def test_the_papers_size_is_compared_with_the_interval(
    low: float | None, high: float | None, said: str
):
    size = {"text": "10% to 46%", "low": low, "high": high}
    assert judged(PAIRED, part(0.2, 0.25), size=size).size == said


def test_a_verdict_says_if_the_case_is_not_the_papers():
    assert judged(PAIRED, part(0.2, 0.4), elsewhere="two unlike tasks").reason == (
        "not the paper's case: two unlike tasks"
    )
    found = judged(PAIRED, part(-0.4, -0.2), elsewhere="two unlike tasks")
    assert found.reason == (
        "the difference has the other sign; not the paper's case: two unlike tasks"
    )


def test_an_earlier_margin_is_judged_too():
    known = {"known": "a first run", "earlier": 0.02}
    found = judged(PAIRED, part(-0.3, 0.05), **known)
    assert (found.verdict, found.earlier) == (SMALL, UNDECIDED)
    assert found.margins == (
        "fixed on 2026-11-25, knowing a first run; with the earlier margin 0.02: undecided"
    )
    assert judged(PAIRED, part(-0.3, 0.01), **known).earlier == ""
    assert judged(PAIRED, part(-0.3, 0.01)).margins == ""


def test_a_claim_that_awaits_rows_or_follows_by_algebra_has_no_verdict_of_its_own():
    found = judged(PAIRED, part(0.2, 0.4), awaits="several epochs")
    assert (found.verdict, found.reason, found.effect) == (UNMEASURED, "several epochs", None)
    found = judged(PAIRED, part(0.2, 0.4), algebra="TVD / sigma")
    assert (found.verdict, found.reason) == ("known by algebra", "TVD / sigma")
    assert found.claim.is_check


def test_a_correlation_is_compared_with_the_constant(monkeypatch: pytest.MonkeyPatch):
    test = {
        "kind": "correlation",
        "first": "quality",
        "second": "block_efficiency",
        "than": 0.5,
        "matters": 0.1,
        "expect": "less",
    }

    def correlated(low: float, high: float) -> Finding:
        effect = CorrelationEffect(Interval((low + high) / 2, low, high), 16, 300, (low, high))
        monkeypatch.setattr(verdicts, "correlation_effect", lambda *_: effect)
        return judge_one(validate(Claim, claim(test)), [], 0.01)

    for low, high, verdict in ((-0.1, 0.3, HOLDS), (0.2, 0.9, UNDECIDED), (0.6, 0.9, FAILS)):
        found = correlated(low, high)
        assert (found.verdict, found.num_units) == (verdict, 300)
        assert found.effect is not None
        assert found.effect.low == pytest.approx(low - 0.5)
        assert (found.first, found.second) == (pytest.approx((low + high) / 2), 0.5)
    test |= {"than": 0.0, "matters": 0.5, "expect": "same"}
    for low, high, verdict in ((-0.4, 0.3, HOLDS), (-0.6, 0.3, UNDECIDED), (-0.9, -0.6, FAILS)):
        assert correlated(low, high).verdict == verdict


@pytest.mark.parametrize(
    ("against", "above", "gain", "verdict"),
    [
        ((0.0, 0.05), (0.2, 0.4), (0.1, 0.2), HOLDS),
        ((0.0, 0.05), (0.02, 0.08), (0.1, 0.2), HOLDS_SMALL),
        ((0.0, 0.05), (0.2, 0.4), (-0.1, 0.2), UNDECIDED),
        ((0.0, 0.05), (0.0, 0.08), (-0.1, 0.2), SMALL),
        ((0.12, 0.3), (0.2, 0.4), (0.1, 0.2), FAILS),
        ((0.05, 0.3), (0.2, 0.4), (0.1, 0.2), UNDECIDED),
    ],
)
def test_dominance_needs_a_small_distance_against_it_and_a_gain(
    against: tuple[float, float],
    above: tuple[float, float],
    gain: tuple[float, float],
    verdict: str,
    monkeypatch: pytest.MonkeyPatch,
):
    parts = [Interval(sum(part) / 2, *part) for part in (against, above, gain)]
    monkeypatch.setattr(verdicts, "dominance_effect", lambda *_: DominanceEffect(*parts, 40))
    assert judge_one(validate(Claim, claim(DOMINANCE)), [], 0.01).verdict == verdict


@pytest.mark.parametrize(
    ("bound", "verdict", "reason"),
    [
        ([0.5, 0.55], "no violation", "0 violations in 2"),
        ([0.5, 0.65], "violated", "1 violations in 2"),
        (
            [-3.0, -2.0],
            "says nothing here",
            "0 violations in 2; the bound is -2.50 on average, which is always true",
        ),
    ],
)
def test_a_bound_is_checked_at_each_unit_and_may_say_nothing(
    bound: list[float], verdict: str, reason: str
):
    """On average 0.6 is above a bound of 0.575; in one of two units it is not."""
    test = {
        "kind": "pointwise",
        "first": {"over": "acceptance"},
        "second": {"over": "bound"},
        "empty": 0.0,
    }
    row = study_row({"acceptance": [0.6, 0.6], "bound": bound})
    found = judge_one(validate(Claim, claim(test)), [row], 0.01)
    assert (found.verdict, found.reason, found.num_units) == (verdict, reason, 2)


def test_violations_are_counted_at_positions_and_identities_are_exact():
    counts = {"kind": "pointwise", "violations": "bad", "positions": "tokens"}
    for bad, verdict in ((0.0, "no violation"), (1.0, "violated")):
        row = study_row({"bad": [0.0, bad], "tokens": [20.0, 30.0]})
        found = judge_one(validate(Claim, claim(counts)), [row], 0.01)
        assert (found.verdict, found.num_units) == (verdict, 50)
    sides = {"first": {"where": {"rule": "a"}}, "second": {"where": {"rule": "b"}}}
    equal = {"kind": "pointwise", "over": ["calls", "tokens"], "equal": True} | sides
    for tokens, verdict in (([9.0, 8.0], "no violation"), ([9.0, 8.1], "violated")):
        rows = [
            study_row({"calls": [2.0, 3.0], "tokens": [9.0, 8.0]}, rule="a"),
            study_row({"calls": [2.0, 3.0], "tokens": tokens}, rule="b"),
        ]
        assert judge_one(validate(Claim, claim(equal)), rows, 0.01).verdict == verdict


def test_a_claim_has_an_equal_part_of_its_papers_rate(monkeypatch: pytest.MonkeyPatch):
    """Checks take no part: they have no error rate."""
    tails: list[float] = []

    def evidence(_test: Any, _rows: Any, tail: float, _everything: Any) -> None:
        tails.append(tail)

    monkeypatch.setattr(verdicts, "paired_evidence", evidence)
    papers = ["DistillSpec", "DistillSpec", "Faster Cascades"]
    claims = [
        claim(PAIRED, id=f"c{n}", paper=paper, study="tiny" if n != 1 else "other")
        for n, paper in enumerate(papers)
    ]
    theorem = {"kind": "pointwise", "violations": "bad", "positions": "tokens"}
    claims.append(claim(theorem, id="theorem"))
    file = validate(ClaimFile, {"error_rate": 0.06, "claims": claims})
    judge(file, [study_row({"score": [1.0]})])
    assert tails == pytest.approx([0.06 / 2 / 2, 0.06 / 2 / 2, 0.06 / 1 / 2])


def test_claims_use_the_rows_of_their_own_study_and_name_a_command():
    file = validate(ClaimFile, {"claims": [claim(PAIRED)]})
    rows = [
        study_row({"score": [1.5 + n / 100 for n in range(20)]}, study=s) for s in ("tiny", "o")
    ]
    (found,) = judge(file, rows)
    assert (found.verdict, found.num_units) == (HOLDS, 20)
    assert found.command == "paceline trajectory --config tau.yaml"
    (found,) = judge(file, rows[1:])
    assert (found.verdict, found.command) == (UNMEASURED, "")
    assert found.reason == "a side has no rows, or fewer than 8 examples"


@pytest.mark.parametrize(
    ("claims", "said"),
    [
        ([claim(PAIRED), claim(PAIRED)], "two claims have the id one; rename one"),
        ([claim(PAIRED | {"than": None})], "a paired test needs one of second and than"),
        ([claim(PAIRED | {"second": {}})], "a paired test needs one of second and than"),
        ([claim(PAIRED | {"each": ["a"], "most": ["b"]})], "one of each and most"),
        ([claim(PAIRED | {"each": ["a"], "expect": "same"})], "cannot expect same"),
        ([claim(PAIRED | {"matter": 1})], "matter: unknown key; did you mean matters?"),
        ([claim(PAIRED, paper="Another")], "claims.0.paper"),
        ([claim(PAIRED, size={"text": "a", "low": 1.0})], "both of low and high, or neither"),
        ([claim({"kind": "pointwise"})], "needs either violations and positions, or first"),
    ],
)
def test_a_mistake_in_a_file_of_claims_is_one_line(claims: list[dict[str, Any]], said: str):
    with pytest.raises(ConfigError) as caught:
        validate(ClaimFile, {"claims": claims})
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
