"""Verdicts by hand: on intervals, on strata, on pairs of a frontier, and the rate of a claim."""

from typing import Any

import pytest

from paceline.config import validate
from paceline.core.bootstrap import Interval
from paceline.errors import ConfigError, UsageError
from paceline.studies import verdicts
from paceline.studies.claim_file import Claim, ClaimFile
from paceline.studies.correlation import CorrelationEffect
from paceline.studies.dominance import DominanceEffect
from paceline.studies.evidence import Effect
from paceline.studies.frontier_evidence import FrontierEffect, PairEffect
from paceline.studies.verdicts import Finding, judge, judge_one, verdict_of
from study_rows import claim, study_row

SEVERAL = "the interval contains several verdicts"
HOLDS, FAILS, SMALL = "holds", "does not hold", "too small to matter here"
UNDECIDED, UNMEASURED = "undecided", "not measured"
PAIRED = {"kind": "paired", "over": "tau", "first": {}, "than": 1.0, "matters": 0.1}
FRONTIER = {
    "kind": "frontier",
    "at_equal": "accepted",
    "firsts": ["opt"],
    "seconds": ["chow", "lossy"],
    "matters": 0.1,
}
DOMINANCE = {
    "kind": "dominance",
    "over": "tau",
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
        (0.05, 0.08, SMALL, HOLDS, HOLDS),
        (-0.05, 0.3, UNDECIDED, HOLDS, UNDECIDED),
        (-0.05, 0.05, SMALL, HOLDS, HOLDS),
        (-0.3, 0.05, FAILS, UNDECIDED, UNDECIDED),
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


def judged(test: dict[str, Any], effect: Any, monkeypatch: pytest.MonkeyPatch) -> Finding:
    """The verdict if the rows had this effect."""
    name = {"paired": "paired_effect", "frontier": "frontier_effect"}
    monkeypatch.setattr(verdicts, name.get(test["kind"], "dominance_effect"), lambda *_: effect)
    return judge_one(validate(Claim, claim(test)), [], 0.01)


def paired(low: float, high: float, **strata: float) -> Effect:
    return Effect(Interval((low + high) / 2, low, high), 1.2, 1.0, 20, strata)


def test_a_claim_on_a_mean_says_where_it_is_reversed(monkeypatch: pytest.MonkeyPatch):
    same_way, other_way = paired(0.2, 0.4, a=0.3, b=0.3), paired(0.2, 0.4, a=0.7, b=-0.1)
    assert judged(PAIRED, same_way, monkeypatch).reason == ""
    found = judged(PAIRED, other_way, monkeypatch)
    assert (found.verdict, found.reason) == (HOLDS, "on average, but not in b")
    lower = paired(-0.4, -0.2, a=-0.7, b=0.1)
    assert judged(PAIRED, lower, monkeypatch).verdict == FAILS
    found = judged(PAIRED | {"expect": "less"}, lower, monkeypatch)
    assert (found.verdict, found.reason) == (HOLDS, "on average, but not in b")


@pytest.mark.parametrize(
    ("a", "b", "expect", "verdict", "reason"),
    [
        ((0.3, 0.5), (0.2, 0.4), "more", HOLDS, "alpha b"),
        ((0.3, 0.5), (-0.5, -0.3), "more", FAILS, "alpha b"),
        ((-0.6, -0.4), (-0.3, -0.2), "less", HOLDS, "alpha b"),
        ((-0.6, -0.4), (0.3, 0.5), "less", FAILS, "alpha b"),
        ((0.3, 0.5), (-0.05, 0.4), "more", UNDECIDED, f"alpha b: {SEVERAL}"),
        # it fails by its own interval, but not by the one for a claim on any of them
        ((0.3, 0.5), (-0.4, 0.05), "more", UNDECIDED, f"alpha b: {SEVERAL}"),
    ],
)
def test_a_claim_on_each_value_holds_in_all_or_fails_in_one(
    a: tuple[float, float],
    b: tuple[float, float],
    expect: str,
    verdict: str,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
):
    effects = [
        (f"alpha {name}", paired(*bounds), paired(bounds[0] - 0.1, bounds[1] + 0.1))
        for name, bounds in (("a", a), ("b", b))
    ]
    test = PAIRED | {"each": True, "across": ["alpha"], "expect": expect}
    monkeypatch.setattr(verdicts, "each_effect", lambda *_: effects)
    found = judge_one(validate(Claim, claim(test)), [], 0.01)
    assert (found.verdict, found.reason) == (verdict, reason)
    assert found.effect == effects[1][2 if verdict == FAILS else 1].interval


def test_a_correlation_is_compared_with_the_constant(monkeypatch: pytest.MonkeyPatch):
    test = {
        "kind": "correlation",
        "first": {"over": "score"},
        "second": {"over": "emitted_5", "under": "blocks_5"},
        "than": 0.5,
        "matters": 0.1,
        "expect": "less",
    }
    for low, high, verdict in ((-0.1, 0.4, HOLDS), (0.2, 0.9, UNDECIDED), (0.6, 0.9, FAILS)):
        effect = CorrelationEffect(Interval((low + high) / 2, low, high), 16, 300)
        monkeypatch.setattr(verdicts, "correlation_effect", lambda *_, e=effect: e)
        found = judge_one(validate(Claim, claim(test)), [], 0.01)
        assert (found.verdict, found.num_units) == (verdict, 300)
        assert found.effect is not None
        assert found.effect.low == pytest.approx(low - 0.5)
        assert (found.first, found.second) == (pytest.approx((low + high) / 2), 0.5)


def test_a_paired_claim_without_an_effect_is_not_measured(monkeypatch: pytest.MonkeyPatch):
    found = judged(PAIRED, None, monkeypatch)
    assert (found.verdict, found.effect, found.num_units) == (UNMEASURED, None, 0)
    assert found.reason == "a side has no rows, or fewer than 8 examples"


def pair(low: float, high: float, *, name: str = "chow", wider: float = 0.1) -> PairEffect:
    """Its interval; the strict one is wider on both sides."""
    middle = (low + high) / 2
    strict = Interval(middle, low - wider, high + wider)
    return PairEffect("opt", name, Interval(middle, low, high), strict, 0.8, 0.6)


@pytest.mark.parametrize(
    ("pairs", "missing", "verdict", "reason"),
    [
        ([pair(0.2, 0.4), pair(0.05, 0.3, name="lossy")], 0, HOLDS, "opt against lossy"),
        ([pair(0.2, 0.4), pair(-0.02, 0.02, wider=0.01)], 0, SMALL, "opt against chow"),
        # small by its own interval, not by the one for two pairs
        (
            [pair(0.2, 0.4), pair(-0.05, 0.05, name="lossy")],
            0,
            UNDECIDED,
            "opt against lossy: the interval contains several verdicts",
        ),
        (
            [pair(0.2, 0.4), pair(-0.05, 0.3, name="lossy")],
            0,
            UNDECIDED,
            "opt against lossy: the interval contains several verdicts",
        ),
        # by its own interval it fails, by the one for two pairs it does not
        (
            [pair(0.2, 0.4), pair(-0.3, 0.05, name="lossy")],
            0,
            UNDECIDED,
            "opt against lossy: the interval contains several verdicts",
        ),
        ([pair(0.2, 0.4), pair(-0.5, -0.3, name="lossy")], 0, FAILS, "opt against lossy"),
        # a pair that fails decides, whatever is missing
        ([pair(-0.5, -0.3)], 1, FAILS, "opt against chow"),
        (
            [pair(0.2, 0.4)],
            1,
            UNDECIDED,
            "opt against chow: 1 pairs are not measured, or have no cost in common",
        ),
    ],
)
def test_a_frontier_claim_holds_for_all_pairs_or_fails_for_one(
    pairs: list[PairEffect],
    missing: int,
    verdict: str,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
):
    found = judged(FRONTIER, FrontierEffect(tuple(pairs), missing, 50), monkeypatch)
    assert (found.verdict, found.reason) == (verdict, reason)


def test_the_pair_that_fails_is_the_one_that_is_shown(monkeypatch: pytest.MonkeyPatch):
    """Expected the same: one pair is above what matters, the other below it and undecided."""
    pairs = pair(0.5, 0.6), pair(-0.25, 0.1, name="lossy")
    test = FRONTIER | {"expect": "same"}
    found = judged(test, FrontierEffect(pairs, 0, 50), monkeypatch)
    assert (found.verdict, found.reason) == (FAILS, "opt against chow")
    assert found.effect == pairs[0].strict


@pytest.mark.parametrize(
    ("against", "above", "gain", "verdict"),
    [
        ((0.0, 0.05), (0.2, 0.4), (0.1, 0.2), HOLDS),
        ((0.0, 0.05), (0.2, 0.4), (-0.1, 0.2), UNDECIDED),
        ((0.0, 0.05), (0.0, 0.08), (0.1, 0.2), SMALL),
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
    found = judged(DOMINANCE, DominanceEffect(*parts, 40), monkeypatch)
    assert found.verdict == verdict


def test_a_claim_has_an_equal_part_of_its_papers_rate_at_each_look(
    monkeypatch: pytest.MonkeyPatch,
):
    tails: list[float] = []

    def effect(_test: Any, _rows: Any, tail: float) -> None:
        tails.append(tail)

    monkeypatch.setattr(verdicts, "paired_effect", effect)
    papers = ["DistillSpec", "DistillSpec", "Faster Cascades"]
    claims = [
        claim(PAIRED, id=f"c{n}", paper=paper, study="tiny" if n != 1 else "other")
        for n, paper in enumerate(papers)
    ]
    file = validate(ClaimFile, {"error_rate": 0.06, "claims": claims})
    judge(file, [study_row({"tau": [1.0]})], {"tiny": 3})
    assert tails == pytest.approx([0.06 / 2 / 3 / 2, 0.06 / 2 / 1 / 2, 0.06 / 1 / 3 / 2])
    with pytest.raises(UsageError, match="the number of looks of study tiny is not known"):
        judge(file, [study_row({"tau": [1.0]})], {})


def test_claims_use_the_rows_of_their_own_study_and_name_a_command():
    file = validate(ClaimFile, {"claims": [claim(PAIRED)]})
    rows = [study_row({"tau": [1.5 + n / 100 for n in range(20)]}, study=s) for s in ("tiny", "o")]
    (found,) = judge(file, rows, {"tiny": 1, "o": 1})
    assert (found.verdict, found.num_units) == (HOLDS, 20)
    assert found.command == "paceline trajectory --config tau.yaml"
    (found,) = judge(file, rows[1:], {"tiny": 1, "o": 1})
    assert (found.verdict, found.command) == (UNMEASURED, "")


@pytest.mark.parametrize(
    ("claims", "said"),
    [
        ([claim(PAIRED), claim(PAIRED)], "two claims have the id one; rename one"),
        ([claim(PAIRED | {"than": None})], "a paired test needs one of second and than"),
        ([claim(PAIRED | {"second": {}})], "a paired test needs one of second and than"),
        ([claim(PAIRED | {"matter": 1})], "matter: unknown key; did you mean matters?"),
        ([claim(PAIRED, paper="Another")], "claims.0.paper"),
    ],
)
def test_a_mistake_in_a_file_of_claims_is_one_line(claims: list[dict[str, Any]], said: str):
    with pytest.raises(ConfigError) as caught:
        validate(ClaimFile, {"claims": claims})
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
