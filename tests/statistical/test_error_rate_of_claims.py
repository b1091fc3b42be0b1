"""Error rates of verdicts on claims.

Each simulated study has 40 texts and one claim at a rate of 10%, so that 5% of its studies at most
may err on either side; a paper has four such studies and shares the rate. Texts differ in length
and in difficulty, which both drafts share, as in the committed rows: tau of a text varies by 25%,
and the noise of a draft on a text is 8%. An error rate in n studies is binomial: limits lie 4
standard deviations above the rate, so that a false alarm under another seed has odds below 1e-4 for
each case.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.config import validate
from paceline.core.bootstrap import Interval, student_quantile
from paceline.results.row import Row
from paceline.studies import evidence
from paceline.studies.claim_file import Claim, ClaimFile
from paceline.studies.evidence_of_drafts import correlation, distances
from paceline.studies.verdicts import FAILS, HOLDS, HOLDS_SMALL, SMALL, judge, judge_one
from support.exact import limit
from support.results import claim, study_row

RATE, TEXTS, MATTERS = 0.1, 40, 0.02
SIDE = RATE / 2  # the probability of an error on one side
STUDIES, CLAIMS = 400, 4

Draw = Callable[[torch.Generator], list[Row]]


def ratios(effect: float, *, drafts: int = 1, texts: int = TEXTS) -> Draw:
    """Rows with tokens and blocks of `drafts` aligned drafts, and of the first one.

    Whatever makes a text easier for one aligned draft makes it so for all.
    """

    def draw(rng: torch.Generator) -> list[Row]:
        def normal() -> Tensor:
            return torch.randn(texts, generator=rng, dtype=torch.float64)

        tokens = (0.5 * normal() + 3.5).exp().ceil().clamp(2, 64)
        text, aligned = (0.25 * normal()).exp(), (0.08 * normal()).exp()

        def row(gain: float, **setting: Any) -> Row:
            noise = aligned if setting["label"] == "end" else (0.08 * normal()).exp()
            blocks = tokens / (2.5 * text * gain * noise * (0.02 * normal()).exp())
            sums = {"emitted": tokens.tolist(), "calls": blocks.tolist()}
            return study_row(sums, **setting)

        ends = [row(1 + effect, label="end", draft=str(number)) for number in range(drafts)]
        return [*ends, row(1.0, label="start")]

    return draw


def rare(effect: float) -> Draw:
    """Scores of 0 or 1 that are 1 for the target, and 0 for `effect` of the other's answers."""

    def draw(rng: torch.Generator) -> list[Row]:
        wrong = (torch.rand(TEXTS, generator=rng) < effect).double()
        sides = {"end": 1 - wrong, "start": torch.ones(TEXTS)}
        return [study_row({"score": v.tolist()}, label=k) for k, v in sides.items()]

    return draw


def paired(**changes: Any) -> dict[str, Any]:
    """A claim that the aligned drafts have more tokens per block than the first one."""
    test = {
        "kind": "paired",
        "figure": "block_efficiency",
        "across": ["draft"],
        "first": {"where": {"label": "end"}},
        "second": {"where": {"label": "start"}},
        "matters": MATTERS,
    }
    return claim(test | changes)


def wanted(**changes: Any) -> Claim:
    return validate(Claim, paired(**changes))


def scored(expect: str) -> Claim:
    """A claim on a difference of scores that matters from 0.04."""
    return wanted(figure="quality", compare="difference", across=[], expect=expect, matters=0.04)


def outcomes(
    draw: Draw, one: Claim, *, studies: int = STUDIES, tail: float = SIDE
) -> dict[str, float]:
    """Fractions of the verdicts. `tail`: the probability on either side of an interval."""
    rng, found = torch.Generator().manual_seed(1), Counter()
    for _ in range(studies):
        verdict = judge_one(one, draw(rng), tail).verdict
        found[HOLDS if verdict == HOLDS_SMALL else verdict] += 1
    return {verdict: count / studies for verdict, count in found.items()}


def papers_that_err(papers: int = STUDIES) -> float:
    """Fraction of papers of which any claim is said to hold though no effect is there.

    The claims are on studies of their own: errors that do not occur together are the worst case.
    """
    claims = [paired() | {"id": name, "study": name} for name in "abcd"[:CLAIMS]]
    file = validate(ClaimFile, {"error_rate": RATE, "claims": claims})
    rng, draw, errors = torch.Generator().manual_seed(1), ratios(0.0), 0
    for _ in range(papers):
        rows = [
            row.model_copy(update={"study": one.study}) for one in file.claims for row in draw(rng)
        ]
        errors += any(one.verdict in (HOLDS, HOLDS_SMALL) for one in judge(file, rows))
    return errors / papers


@pytest.mark.parametrize("drafts", [1, 3])
def test_an_effect_of_nothing_is_rarely_said_to_hold_or_to_have_the_other_sign(drafts: int):
    """400 studies, 5% nominal on either side: a false alarm needs more than 9.4%."""
    found = outcomes(ratios(0.0, drafts=drafts), wanted())
    assert found.get(HOLDS, 0) < limit(SIDE, STUDIES)
    assert found.get(FAILS, 0) < limit(SIDE, STUDIES)


@pytest.mark.parametrize("drafts", [1, 3])
def test_an_effect_that_matters_is_rarely_called_small_or_failing(drafts: int):
    """400 studies, 5% nominal: a false alarm needs more than 9.4%."""
    found = outcomes(ratios(MATTERS, drafts=drafts), wanted())
    assert found.get(SMALL, 0) + found.get(FAILS, 0) < limit(SIDE, STUDIES)


@pytest.mark.parametrize(
    ("expect", "effect"), [("no_less", -MATTERS), ("same", MATTERS), ("same", -MATTERS)]
)
def test_at_the_border_neither_verdict_is_given_often(expect: str, effect: float):
    """400 studies at the border of `same` or `no_less`; 5% nominal on either side."""
    found = outcomes(ratios(effect), wanted(expect=expect))
    assert found.get(HOLDS, 0) < limit(SIDE, STUDIES)
    assert found.get(FAILS, 0) < limit(SIDE, STUDIES)


def test_twice_the_effect_that_matters_is_found():
    """Power of 120 texts at 4%: 94% of 3,000 studies; 400 studies fall below 88% once in 1e5."""
    assert outcomes(ratios(2 * MATTERS, texts=120), wanted())[HOLDS] > 0.88


@pytest.mark.parametrize("expect", ["same", "no_less"])
def test_rare_differences_are_not_called_the_same(expect: str):
    """A loss of 4% of all answers that matters from 4%: 40 answers show none one time in five.

    400 studies, 5% nominal; by Student's interval alone 18% say that it holds.
    """
    assert outcomes(rare(0.04), scored(expect)).get(HOLDS, 0) < limit(SIDE, STUDIES)


def students(
    groups: list[Tensor], tail: float, rng: torch.Generator, extremes: object
) -> tuple[float, float]:
    """The mutant of `mean_bounds`: Student's interval of one group."""
    (values_N,) = groups
    half = student_quantile(1 - 2 * tail, len(values_N) - 1) * float(values_N.std())
    return -half / len(values_N) ** 0.5, half / len(values_N) ** 0.5


def test_the_ordinary_interval_of_rare_differences_is_caught(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(evidence, "mean_bounds", students)
    assert outcomes(rare(0.04), scored("same"))[HOLDS] > limit(SIDE, STUDIES)


def test_an_interval_with_the_whole_rate_on_either_side_is_caught():
    """1,600 studies, 5% nominal: the mutant errs in 8.9%, the limit is 7.2%."""
    found = outcomes(ratios(0.0), wanted(), tail=RATE, studies=4 * STUDIES)
    assert found[HOLDS] > limit(SIDE, 4 * STUDIES)


def test_a_paper_of_several_claims_rarely_errs_in_any():
    """400 papers, 5% nominal: a false alarm needs more than 9.4%."""
    assert papers_that_err() < limit(SIDE, STUDIES)


def test_claims_at_the_whole_rate_of_their_paper_are_caught(monkeypatch: pytest.MonkeyPatch):
    """The mutant does not divide the rate by the number of claims: 15% of papers err."""
    monkeypatch.setattr(ClaimFile, "level", {})
    assert papers_that_err() > limit(SIDE, STUDIES)


def test_strata_that_are_taken_for_independent_are_caught(monkeypatch: pytest.MonkeyPatch):
    """The mutant takes the texts of three drafts for different ones."""
    original = evidence._mean

    def independent(test: Any, strata: list[evidence.Stratum], *rest: Any) -> evidence.Part:
        apart = [one._replace(population=str(number)) for number, one in enumerate(strata)]
        return original(test, apart, *rest)

    monkeypatch.setattr(evidence, "_mean", independent)
    found = outcomes(ratios(0.0, drafts=3), wanted())
    assert found[HOLDS] > limit(SIDE, STUDIES)


def test_sides_that_are_taken_for_independent_are_caught(monkeypatch: pytest.MonkeyPatch):
    """The mutant adds the variances of both sides, as if each had texts of its own: no power."""
    original = evidence._compared

    def unpaired(test: Any, name: str, row: Row, one: Any, two: Any) -> evidence.Stratum:
        found = original(test, name, row, one, two)
        parts = one.influence_N / one.value, two.influence_N / two.value
        spread_N = (parts[0].square() + parts[1].square()).sqrt()
        signs_N = 1.0 - 2.0 * (torch.arange(len(spread_N)) % 2)
        effect = found.effect._replace(influence_N=spread_N * signs_N)
        return found._replace(effect=effect)

    monkeypatch.setattr(evidence, "_compared", unpaired)
    assert outcomes(ratios(2 * MATTERS, texts=120), wanted()).get(HOLDS, 0) < 0.5


def dominance_errors(
    border: float, count: int, studies: int, way: Callable[..., Any] = distances
) -> tuple[float, float]:
    """How often D is said to be above 0.1, and below it, if it is `border`.

    The first side is the second with new noise, and `border` of its values at the bottom.
    """
    rng, above, below = torch.Generator().manual_seed(count), 0, 0
    for _ in range(studies):
        text, *noise = torch.randn(3, count, generator=rng, dtype=torch.float64)
        first, second = text + 0.5 * noise[0], text + 0.5 * noise[1]
        first[torch.rand(count, generator=rng) < border] = -9.0
        found = way(first, second, SIDE)
        above += found.against.low > 0.1
        below += found.against.high < 0.1
    return above / studies, below / studies


@pytest.mark.parametrize("border", [0.0, 0.1])
def test_dominance_is_rarely_denied_or_asserted_wrongly(border: float):
    """80 studies of 40 texts, 5% nominal: a false alarm needs more than 14.7%."""
    above, below = dominance_errors(border, 40, 80)
    assert above < limit(SIDE, 80)
    if border:
        assert below < limit(SIDE, 80)


def test_the_quantile_of_resampled_distances_is_caught():
    """The mutant's lower bound; a largest difference grows with its noise, its resamples more."""

    def mutant(first: Tensor, second: Tensor, tail: float) -> Any:
        found = distances(first, second, tail)
        rng = torch.Generator().manual_seed(0)
        picks_RN = torch.randint(len(first), (500, len(first)), generator=rng)
        points_X = torch.cat([first, second])
        sides = [
            (side[picks_RN][..., None] <= points_X).double().mean(1) for side in (first, second)
        ]
        low = float(torch.quantile((sides[0] - sides[1]).amax(-1), tail))
        return found._replace(against=Interval(found.against.value, low, found.against.high))

    assert dominance_errors(0.0, 16, 100, mutant)[0] > limit(SIDE, 100)


Correlate = Callable[[Tensor, Tensor, Tensor, Tensor, float], Interval]


def correlation_errors(
    true: float, studies: int, way: Correlate = correlation
) -> tuple[float, float]:
    """How often a correlation over 12 drafts is said to be above what it is, and below it.

    The figures of the drafts have exactly this correlation. Their errors are 0.6 times as large as
    the drafts differ, and partly shared by all drafts and by both figures, as the examples are.
    """
    rng, count, above, below = torch.Generator().manual_seed(7), 100, 0, 0

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    for _ in range(studies):
        first, other = (one - one.mean() for one in normal(2, 12))
        other -= first * (first @ other) / (first @ first)
        first, other = first / first.std(), other / other.std()
        second = true * first + math.sqrt(1 - true**2) * other
        errors = [0.6 * math.sqrt(count) * (normal(count, 12) + normal(count, 1)) for _ in "xy"]
        errors[1] = errors[0] + 0.3 * errors[1]
        values = [figure + error for figure, error in zip((first, second), errors, strict=True)]
        given = [part for value in values for part in (value.mean(0), value - value.mean(0))]
        found = way(*given, SIDE)
        above += found.low > true
        below += found.high < true
    return above / studies, below / studies


@pytest.mark.parametrize("true", [0.0, 0.5])
def test_a_correlation_is_rarely_denied_or_asserted_wrongly(true: float):
    above, below = correlation_errors(true, STUDIES)
    assert above < limit(SIDE, STUDIES)
    assert below < limit(SIDE, STUDIES)


def test_a_correlation_with_the_errors_of_its_figures_is_caught():
    """The mutant takes the figures for exact: errors that both share make a correlation of 0."""

    def mutant(x_D: Tensor, ex_ND: Tensor, y_D: Tensor, ey_ND: Tensor, tail: float) -> Interval:
        exact = correlation(x_D, torch.zeros_like(ex_ND), y_D, torch.zeros_like(ey_ND), tail)
        found = correlation(x_D, ex_ND, y_D, ey_ND, tail)
        return Interval(*(exact.value + bound - found.value for bound in found))

    assert correlation_errors(0.0, STUDIES, mutant)[0] > limit(SIDE, STUDIES)
