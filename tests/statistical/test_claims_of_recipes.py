"""Error rates of claims on recipes, whose drafts are a sample of runs and whose texts are another.

The figure of a run on a text is the recipe's mean, plus the run's own deviation, plus those of the
text, of the recipe on the text, and of the run on the text. All recipes have the same mean, so any
claim that one is better is wrong. Limits lie 4 standard deviations of a count above the nominal
rate: a false alarm under another seed has odds below 1e-4 for each case.
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import pytest
import torch

from paceline.config import validate
from paceline.core.bootstrap import student_quantile
from paceline.studies import evidence, seeds
from paceline.studies.claim_file import Claim
from paceline.studies.seeds import Design, Run, Spread, Table, with_seeds
from paceline.studies.verdicts import FAILS, HOLDS, HOLDS_SMALL, SMALL, judge_one
from support.exact import limit
from support.results import claim, study_row

if TYPE_CHECKING:
    from paceline.results.row import Row

FAR = 2.7e-4  # the tail of a claim of DistillSpec
RECIPES, SEEDS, TEXTS = 8, 2, 60  # degrees of freedom are enough without other studies


def far_errors(
    runs: float, own: float, texts: float, shared: float = 0.0, *, form: str = "right"
) -> float:
    """How often the recipes of one text are wrongly above those of another at the far tail.

    In 60,000 studies (mutants: 20,000), two texts of training have 4 recipes each, with the same 3
    seeds.

    Args:
        runs: Standard deviation between runs.
        own: That of a run on an example, over the square root of the number of examples.
        texts: That of a recipe on an example, likewise.
        shared: That of a seed in all recipes of a text.
        form: `right`, or a mutant: `no seeds`, `normal` (whose caller replaces the quantile) and
            `cancel` (as if a seed did the same to both texts).
    """
    rng, count = torch.Generator().manual_seed(11), 0
    samples = 60_000 if form == "right" else 20_000  # mutants err 30 times as often

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    error_STKM = runs * normal(samples, 2, 4, 3) + own * normal(samples, 2, 4, 3)
    error_STKM += shared * normal(samples, 2, 1, 3)
    mean_ST = error_STKM.mean((-2, -1)) + texts * normal(samples, 2, 4).mean(-1)
    of_seeds_ST = 4 * error_STKM.mean(-2).var(-1)
    inner_STKM = error_STKM - error_STKM.mean(-1, keepdim=True)
    inner_STKM -= inner_STKM.mean(-2, keepdim=True)
    of_runs_ST = inner_STKM.square().sum((-2, -1)) / (3 * 2)
    squares_ST2 = torch.stack((of_seeds_ST, of_runs_ST), -1)
    squares_ST22 = torch.stack((squares_ST2, torch.full_like(squares_ST2, own**2)), -1)
    design = Design.of(
        [
            Run("s", {"seed": seed, "draft": draft, "trained_on": text}, 1 - 2 * text)
            for seed in range(3)
            for draft in range(4)
            for text in range(2)
        ],
        12,
    )
    if form == "cancel":
        design = design._replace(net=0.0)
    half = student_quantile(1 - 2 * FAR, 799) * math.sqrt(own**2 / 6 + texts**2 / 2)
    effects = (mean_ST[:, 0] - mean_ST[:, 1]).tolist()
    for effect, squares_T22 in zip(effects, squares_ST22.tolist(), strict=True):
        low = -half
        if form != "no seeds":
            spread = Spread(tuple(Table(4, 3, *squares_22) for squares_22 in squares_T22))
            low, _ = with_seeds(-half, half, spread, design, FAR, 800)
        count += effect + low > 0
    return count / samples


@pytest.mark.parametrize(
    ("runs", "own", "texts", "shared"),
    [
        (1.0, 0.0, 0.0, 0.0),
        (1.0, 0.5, 0.3, 0.0),
        (1.0, 0.5, 0.3, 1.0),
        (0.3, 0.5, 0.5, 0.3),
        (0.0, 0.7, 0.7, 0.0),
    ],
)
def test_runs_enter_with_their_degrees_of_freedom_at_the_far_tail(
    runs: float, own: float, texts: float, shared: float
):
    """60,000 studies at 2.7e-4: a false alarm needs more than 5.4e-4."""
    assert far_errors(runs, own, texts, shared) < limit(FAR, 60_000)


@pytest.mark.parametrize("mutant", ["no seeds", "normal", "cancel"])
def test_intervals_without_runs_or_degrees_of_freedom_or_shared_seeds_are_caught(
    mutant: str, monkeypatch: pytest.MonkeyPatch
):
    """Without runs every fifth errs; with a normal quantile, more than 3 times the nominal rate."""
    if mutant == "normal":

        def quantile(confidence: float, _freedom: int) -> float:
            return NormalDist().inv_cdf((1 + confidence) / 2)

        monkeypatch.setattr(seeds, "student_quantile", quantile)
    assert far_errors(1.0, 0.5, 0.3, 1.0, form=mutant) > 3 * FAR


def study(rng: torch.Generator, runs: float) -> list[Row]:
    """Tokens and blocks of texts by the drafts of eight recipes, two seeds each, all alike."""

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    tokens_N = (0.5 * normal(TEXTS) + 3.5).exp().ceil().clamp(2, 64)
    texts_N = (0.25 * normal(TEXTS)).exp()
    rows: list[Row] = []
    for recipe in range(RECIPES):
        own_N = (0.08 * normal(TEXTS)).exp()
        for seed in range(SEEDS):
            tau_N = 2.5 * texts_N * own_N * (0.03 * normal(TEXTS)).exp()
            tau_N = tau_N * math.exp(runs * float(normal(1)))
            sums = {"emitted": tokens_N.tolist(), "calls": (tokens_N / tau_N).tolist()}
            rows.append(study_row(sums, draft=f"d{recipe}", seed=seed))
    return rows


def better(first: str) -> Claim:
    """The claim that a draft has a larger tau than d1."""
    test: dict[str, Any] = {
        "kind": "paired",
        "figure": "block_efficiency",
        "across": ["seed"],
        "first": {"where": {"draft": first}},
        "second": {"where": {"draft": "d1"}},
        "matters": 0.02,
    }
    return validate(Claim, claim(test))


def wrong(studies: int, runs: float) -> float:
    """How often `d0 has a larger tau than d1` holds at 5% a side, though both are equal."""
    one = better("d0")
    rng, count = torch.Generator().manual_seed(5), 0
    for _ in range(studies):
        count += judge_one(one, study(rng, runs), 0.05).verdict in (HOLDS, HOLDS_SMALL)
    return count / studies


@pytest.mark.parametrize("runs", [0.0, 0.03])
def test_a_recipe_that_is_no_better_is_rarely_said_to_be(runs: float):
    """300 studies, 5% nominal: a false alarm needs more than 10%."""
    assert wrong(300, runs) < limit(0.05, 300)


def test_claims_without_the_spread_between_runs_are_caught(monkeypatch: pytest.MonkeyPatch):
    """The mutant takes the two drafts of each recipe for all there are: 3% between runs matter."""
    monkeypatch.setattr(evidence, "seed_spread", lambda *_: None)
    assert wrong(300, 0.03) > limit(0.05, 300)


def test_a_recipe_that_is_better_by_much_is_found():
    """Power: 15% more tau with 3% between runs; two of 100 studies may miss it."""
    rng, found, one = torch.Generator().manual_seed(6), 0, better("better")
    for _ in range(100):
        rows = study(rng, 0.03)
        for row in [row for row in rows if row.setting["draft"] == "d0"]:
            blocks = tuple((value or 0.0) / 1.15 for value in row.sums["calls"])
            setting = row.setting | {"draft": "better"}
            sums = row.sums | {"calls": blocks}
            rows.append(row.model_copy(update={"setting": setting, "sums": sums}))
        verdict = judge_one(one, rows, 0.05).verdict
        assert verdict not in (FAILS, SMALL)
        found += verdict == HOLDS
    assert found >= 98
