"""Bounds of theorems beside what they bound: by hand, and by enumerating small models."""

import itertools
import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.config import validate
from paceline.core.rule_base import Position
from paceline.core.rules import Chow, ChowLog, Diff, DiffLog, Opt, OptLog
from paceline.errors import UsageError
from paceline.measure.bounds import BoundsConfig, bounds, regret_and_bound, theorem_bounds
from paceline.results.figures import FIGURES
from paceline.results.row import read_rows

LENGTH = 3


def test_the_bounds_of_two_texts_are_those_worked_out_by_hand():
    """T=3; target texts of 3 and 1 tokens, draft texts of 2 and 2 tokens.

    L = 2, alpha = 1 - (0.3 + 0.2 + 0.1 + 0.4) / 4 = 0.75. E = (0.2, 0.3, 0), so tight is
    1 - (5 * 0.2 + 3 * 0.3) / 2 = 0.05. epsilon = (0.25 + 0.25) / 2, so printed is
    1 - 9 / 2 * 0.25 = -0.125 and proven 1 - 2 * 1.125.
    """
    target_tvd = torch.tensor([[0.3, 0.2, 0.1], [0.4, 0.0, 0.0]])
    target_mask = torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]])
    draft_tvd = torch.tensor([[0.1, 0.4, 0.0], [0.3, 0.2, 0.0]])
    draft_mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 0.0]])
    found = theorem_bounds(
        *(values.double() for values in (target_tvd, target_mask, draft_tvd, draft_mask)),
        max_length=3,
    )
    assert found.length == 2
    assert found.tvd == pytest.approx(0.25)
    assert found.acceptance == pytest.approx(0.75)
    assert found.tight == pytest.approx(0.05)
    assert found.printed == pytest.approx(-0.125)
    assert found.proven == pytest.approx(-1.25)


def expected_tvds(writer: Tensor, target: Tensor, draft: Tensor) -> list[float]:
    """Mean TVD at each position over the texts of `writer`: rows are by the token before.

    Every text has LENGTH tokens; the first token follows row 0.
    """
    means = [0.0] * LENGTH
    for text in itertools.product(range(3), repeat=LENGTH):
        chance, before = 1.0, 0
        for position, token in enumerate(text):
            own = float((target[before] - draft[before]).abs().sum() / 2)
            # each prefix is in 3 ** (LENGTH - position) texts
            means[position] += chance * own / 3 ** (LENGTH - position)
            chance *= float(writer[before, token])
            before = token
    return means


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 10_000), st.floats(0.2, 3.0))
def test_acceptance_of_enumerated_models_is_above_all_proven_bounds(seed: int, closeness: float):
    rng = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, 3, 3, generator=rng, dtype=torch.float64)
    target = logits[0].softmax(-1)
    draft = (logits[0] + logits[1] / closeness).softmax(-1)
    along_target = expected_tvds(target, target, draft)
    along_draft = expected_tvds(draft, target, draft)
    whole = torch.ones(1, LENGTH, dtype=torch.float64)
    found = theorem_bounds(
        torch.tensor([along_target], dtype=torch.float64),
        whole,
        torch.tensor([along_draft], dtype=torch.float64),
        whole,
        LENGTH,
    )
    assert found.acceptance == pytest.approx(1 - sum(along_target) / LENGTH)
    assert found.acceptance >= found.tight - 1e-9
    assert found.tight >= found.proven - 1e-9


TRUTH = torch.tensor([[0.6, 0.3, 0.1]], dtype=torch.float64)
TARGET = torch.tensor([[0.3, 0.5, 0.2]], dtype=torch.float64)
DRAFT = torch.tensor([[0.4, 0.3, 0.3]], dtype=torch.float64)


def test_three_tokens_have_the_regret_worked_out_by_hand():
    """OPT defers, since max q = 0.4 < 0.5 - 0.1 * 0.2. Losses: target 1 - 0.3, draft 1 - 0.6.

    Deferring costs 0.7 + 0.02, the best is 0.4. Bound: 0.2 (the first token) + 0.3 (the first).
    """
    found = regret_and_bound(Opt(alpha=0.1), TRUTH, TARGET, DRAFT)
    assert found.regret.tolist() == pytest.approx([0.32])
    assert found.bound.tolist() == pytest.approx([0.2 + 0.3])
    assert found.num_violations == 0


def test_a_rule_that_knows_the_truth_has_no_regret():
    """With P = p = q no choice is wrong, and the bound is 0 as well."""
    for rule in (Opt(alpha=0.1), OptLog(alpha=0.1)):
        found = regret_and_bound(rule, TARGET, TARGET, TARGET)
        assert found.regret.tolist() == found.bound.tolist() == [0.0]


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 10_000), st.floats(0.0, 1.0))
def test_the_regret_of_random_models_is_below_the_lemmas_bounds(seed: int, alpha: float):
    rng = torch.Generator().manual_seed(seed)
    truth, target, draft = torch.randn(3, 50, 5, generator=rng, dtype=torch.float64).softmax(-1)
    for kind in (Opt, OptLog, Diff, DiffLog, Chow, ChowLog):
        found = regret_and_bound(kind(alpha=alpha), truth, target, draft)
        assert (found.regret >= 0).all()
        assert found.num_violations == 0


def loss(token: int, model: Tensor, *, is_log: bool) -> float:
    """Of a prediction of one token, equations 3 and 22."""
    if is_log:
        return -math.log(float(model[token]))
    return float(token != int(model.argmax()))


def enumerated_risk(
    deferred: Sequence[int], alpha: float, chains: Tensor, *, is_log: bool, sequential: bool
) -> float:
    """Risk over all texts of two tokens; a rule is a decision per token before, 0 at the start.

    Equation 3 (`sequential`: deferring costs the target's loss, too) or equation 22.
    """
    truth, target, draft = chains
    total = 0.0
    for text in itertools.product(range(3), repeat=2):
        chance, before = 1.0, 0
        for token in text:
            chance *= float(truth[before, token])
            before = token
        before = 0
        for token in text:
            if deferred[before]:
                own = loss(token, target[before], is_log=is_log) if sequential else 0.0
                total += chance * (own + alpha)
            else:
                total += chance * loss(token, draft[before], is_log=is_log)
            before = token
    return total


@pytest.mark.parametrize("kind", [Diff, DiffLog, Chow, ChowLog])
@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 10_000), alpha=st.floats(0.01, 0.99))
def test_the_best_rule_of_lemmas_1_and_6_is_the_best_of_all_rules_on_enumerated_texts(
    kind: type[Diff | DiffLog | Chow | ChowLog], seed: int, alpha: float
):
    """All 8 rules over 3 prefixes, on all 9 texts; the prefixes are weighed by their chance."""
    rng = torch.Generator().manual_seed(seed)
    chains = torch.randn(3, 3, 3, generator=rng, dtype=torch.float64).mul(1.5).softmax(-1)
    form = {"is_log": kind in (DiffLog, ChowLog), "sequential": kind in (Diff, DiffLog)}
    risks = [
        enumerated_risk(rule, alpha, chains, **form) for rule in itertools.product((0, 1), repeat=3)
    ]
    rule = kind(alpha=alpha)
    found = regret_and_bound(rule, *chains)
    weights = chains[0][0].clone()
    weights[0] += 1.0  # the first token follows prefix 0, too
    assert float(weights @ found.least_risk) == pytest.approx(min(risks))
    own = rule.defers(Position.of(chains[1], chains[2])).squeeze(-1).int().tolist()
    risk = enumerated_risk(own, alpha, chains, **form)
    assert float(weights @ (found.least_risk + found.regret)) == pytest.approx(risk)


def test_a_rule_that_confuses_the_lemmas_costs_of_deferral_is_caught():
    """The mutant: the cost of lemma 6 in place of that of lemma 1 gives another least risk."""
    chains = torch.stack([TRUTH.expand(3, 3), TARGET.expand(3, 3), DRAFT.expand(3, 3)])
    every = list(itertools.product((0, 1), repeat=3))
    least = min(enumerated_risk(r, 0.1, chains, is_log=False, sequential=True) for r in every)
    wrong = regret_and_bound(Chow(alpha=0.1), *chains)
    assert float(wrong.least_risk.sum()) / 3 * 2 != pytest.approx(least)


def test_a_rule_that_always_defers_breaks_the_bound():
    """The mutant: a target far from the truth and a draft that is the truth, deferred to."""

    class Deferring(Opt):
        def defers(self, at: object) -> Tensor:
            return torch.ones(1, 1, dtype=torch.bool)

    # the draft knows that the second token is the more likely one, by very little
    truth = torch.tensor([[0.499, 0.501]], dtype=torch.float64)
    target = torch.tensor([[0.501, 0.499]], dtype=torch.float64)
    wrong = regret_and_bound(Deferring(alpha=1.0), truth, target, truth)
    assert wrong.regret.item() == pytest.approx(0.002 + 0.002)
    assert wrong.bound.item() == pytest.approx(0.002)
    assert wrong.num_violations == 1
    assert regret_and_bound(Opt(alpha=1.0), truth, target, truth).num_violations == 0


def config(folder: Path, output: Path, **changes: Any) -> BoundsConfig:
    values: dict[str, Any] = {
        "target": str(folder / "target"),
        "draft": str(folder / "draft"),
        "prompts": str(folder / "corpus.jsonl"),
        "output": str(output),
        "num_samples": 1,
        "max_prompt_tokens": 5,
        "max_new_tokens": 3,
    }
    return validate(BoundsConfig, values | changes)


def test_skipped_prompts_are_left_out_and_at_least_one_has_to_remain(folder: Path, tmp_path: Path):
    (found,) = bounds(config(folder, tmp_path / "out", skip_prompts=5))
    assert found.units == (5, 6)
    for skipped in (7, 1000):
        said = rf"corpus\.jsonl has 7 prompts and skip_prompts is {skipped:,}; lower it$"
        with pytest.raises(UsageError, match=said):
            bounds(config(folder, tmp_path / "none", skip_prompts=skipped))
    assert not (tmp_path / "none/manifest.json").exists()


def test_rows_have_the_theorem_and_each_rule_with_its_alpha(folder: Path, tmp_path: Path):
    """A target that is the truth: OPT, which is told its distribution, still pays the draft's."""
    made = config(folder, tmp_path / "out", truth=str(folder / "target"), alphas=[0.2, 3.0])
    found = bounds(made)
    assert read_rows(tmp_path / "out/rows.jsonl") == found
    theorem, *lemmas = found
    assert theorem.setting == {"temperature": 1.0, "max_new_tokens": 3, "theorem": "4.1"}
    names = ["opt", "opt_log", "diff", "diff_log", "chow_log"]
    assert [(row.setting["rule"], row.setting["alpha"]) for row in lemmas] == [
        *((name, 0.2) for name in [*names, "chow"]),
        *((name, 3.0) for name in names),  # more than any probability
    ]
    assert [row.setting["lemma"] for row in lemmas] == [5, 7, 1, 1, 6, 6, 5, 7, 1, 1, 6]
    for row in lemmas:
        assert row.units == theorem.units
        assert set(row.sums["violations"]) == {0.0}
        assert FIGURES["regret"].value(row) <= FIGURES["regret_bound"].value(row)


def test_texts_end_with_the_shortest_context(folder: Path, tmp_path: Path):
    """Of a draft that holds 7 tokens, prompts of which have up to 5."""
    draft = shutil.copytree(folder / "draft", tmp_path / "short")
    settings = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps(settings | {"max_position_embeddings": 7}))
    made = config(folder, tmp_path / "out", draft=str(draft), truth=str(folder / "target"))
    for row in bounds(made):
        lengths = row.sums["length" if "theorem" in row.setting else "positions"]
        assert min(lengths) == 2
