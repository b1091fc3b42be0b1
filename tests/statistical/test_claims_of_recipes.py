"""Error rates of claims on recipes, whose drafts are a sample of runs and whose texts are another.

The figure of a run on a text is the recipe's mean, plus the run's own deviation, plus those of the
text, of the recipe on the text, and of the run on the text. All recipes have the same mean, so any
claim that one is better is wrong. Limits lie 4 standard deviations of a count above the nominal
rate: a false alarm under another seed has odds below 1e-4 for each case.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
import torch

from paceline.config import validate
from paceline.core.bootstrap import student_quantile
from paceline.studies import evidence
from paceline.studies.claim_file import Claim
from paceline.studies.seeds import Design, Run, Spread, with_seeds
from paceline.studies.verdicts import FAILS, HOLDS, HOLDS_SMALL, SMALL, judge_one
from support.results import claim, study_row

if TYPE_CHECKING:
    from paceline.results.row import Row

FAR = 2.7e-4  # the tail of a claim of DistillSpec
RECIPES, SEEDS, TEXTS = 6, 2, 60


def limit(rate: float, count: int) -> float:
    """4 standard deviations above a rate."""
    return rate + 4 * math.sqrt(rate * (1 - rate) / count)


def far_errors(runs: float, own: float, texts: float, *, form: str, samples: int) -> float:
    """How often one of 11 recipes with two seeds is wrongly above another, at the far tail.

    Args:
        runs: Standard deviation between runs.
        own: That of a run on a text, over the square root of the number of texts.
        texts: That of a recipe on a text, likewise.
        form: `right`, or the mutants `no seeds`, `normal` (as if there were many seeds).
        samples: Number of studies.
    """
    rng, count = torch.Generator().manual_seed(11), 0

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    error_SKM = runs * normal(samples, 11, 2) + own * normal(samples, 11, 2)
    error_SK = error_SKM.mean(-1) + texts * normal(samples, 11)
    effect_S = error_SK[:, 0] - error_SK[:, 1]
    within_S = (error_SKM[..., 0] - error_SKM[..., 1]).square().mean(-1) / 2
    design = Design.of(
        [Run("s", {"seed": m, "draft": d}, 1 - 2 * d) for d in (0, 1) for m in (0, 1)], 2
    )
    half = student_quantile(1 - 2 * FAR, 799) * math.sqrt(own**2 + 2 * texts**2)
    for effect, within in zip(effect_S.tolist(), within_S.tolist(), strict=True):
        spread = Spread(within, own**2, 0.0, 10 if form != "normal" else 100_000)
        low = -half
        if form != "no seeds":
            low, _ = with_seeds(-half, half, spread, design, FAR, 800)
        count += effect + low > 0
    return count / samples


@pytest.mark.parametrize(
    ("runs", "own", "texts"),
    [(1.0, 0.0, 0.0), (1.0, 0.5, 0.3), (0.3, 0.5, 0.5), (0.0, 0.7, 0.7)],
)
def test_runs_enter_with_their_degrees_of_freedom_at_the_far_tail(
    runs: float, own: float, texts: float
):
    """60,000 studies at 2.7e-4: a false alarm needs more than 5.4e-4."""
    rate = far_errors(runs, own, texts, form="right", samples=60_000)
    assert rate < limit(FAR, 60_000)


@pytest.mark.parametrize("mutant", ["no seeds", "normal"])
def test_intervals_without_runs_or_with_a_normal_quantile_are_caught(mutant: str):
    """Without runs every fifth errs; with a normal quantile, more than 3 times the nominal rate."""
    rate = far_errors(1.0, 0.5, 0.3, form=mutant, samples=60_000)
    assert rate > 3 * FAR


def study(rng: torch.Generator, runs: float) -> list[Row]:
    """Tokens and blocks of texts by the drafts of six recipes, two seeds each, all alike."""

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


def wrong(studies: int, runs: float) -> float:
    """How often `draft d0 has a larger tau than d1` holds or fails at 5% a side, though equal."""
    test = {
        "kind": "paired",
        "figure": "block_efficiency",
        "across": ["seed"],
        "first": {"where": {"draft": "d0"}},
        "second": {"where": {"draft": "d1"}},
        "matters": 0.02,
    }
    one = validate(Claim, claim(test))
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
    rng, found = torch.Generator().manual_seed(6), 0
    test = {
        "kind": "paired",
        "figure": "block_efficiency",
        "across": ["seed"],
        "first": {"where": {"draft": "better"}},
        "second": {"where": {"draft": "d1"}},
        "matters": 0.02,
    }
    for _ in range(100):
        rows = study(rng, 0.03)
        for row in [row for row in rows if row.setting["draft"] == "d0"]:
            blocks = tuple((value or 0.0) / 1.15 for value in row.sums["calls"])
            setting = row.setting | {"draft": "better"}
            sums = row.sums | {"calls": blocks}
            rows.append(row.model_copy(update={"setting": setting, "sums": sums}))
        verdict = judge_one(validate(Claim, claim(test)), rows, 0.05).verdict
        assert verdict not in (FAILS, SMALL)
        found += verdict == HOLDS
    assert found >= 98
