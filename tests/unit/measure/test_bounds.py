"""Bounds of theorems beside what they bound: by hand, and by enumerating small models."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.config import validate
from paceline.core.rules import Opt, OptLog
from paceline.errors import UsageError
from paceline.measure.bounds import BoundsConfig, bounds, regret_and_bound, theorem_bounds
from support.runs import write_pair

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
        7,
        *(values.double() for values in (target_tvd, target_mask, draft_tvd, draft_mask)),
        max_length=3,
    )
    assert found.prompt == 7
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
        0,
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
    assert found.regret_T.tolist() == pytest.approx([0.32])
    assert found.bound_T.tolist() == pytest.approx([0.2 + 0.3])
    assert found.num_violations == 0


def test_a_rule_that_knows_the_truth_has_no_regret():
    """With P = p = q no choice is wrong, and the bound is 0 as well."""
    for rule in (Opt(alpha=0.1), OptLog(alpha=0.1)):
        found = regret_and_bound(rule, TARGET, TARGET, TARGET)
        assert found.regret_T.tolist() == found.bound_T.tolist() == [0.0]


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 10_000), st.floats(0.0, 1.0))
def test_the_regret_of_random_models_is_below_the_lemmas_bounds(seed: int, alpha: float):
    rng = torch.Generator().manual_seed(seed)
    truth, target, draft = torch.randn(3, 50, 5, generator=rng, dtype=torch.float64).softmax(-1)
    for rule in (Opt(alpha=alpha), OptLog(alpha=alpha)):
        found = regret_and_bound(rule, truth, target, draft)
        assert (found.regret_T >= 0).all()
        assert found.num_violations == 0


def test_a_rule_that_always_defers_breaks_the_bound():
    """The mutant: a target far from the truth and a draft that is the truth, deferred to."""

    class Deferring(Opt):
        def defers(self, at: object) -> Tensor:
            return torch.ones(1, 1, dtype=torch.bool)

    # the draft knows that the second token is the more likely one, by very little
    truth = torch.tensor([[0.499, 0.501]], dtype=torch.float64)
    target = torch.tensor([[0.501, 0.499]], dtype=torch.float64)
    wrong = regret_and_bound(Deferring(alpha=1.0), truth, target, truth)
    assert wrong.regret_T.item() == pytest.approx(0.002 + 0.002)
    assert wrong.bound_T.item() == pytest.approx(0.002)
    assert wrong.num_violations == 1
    assert regret_and_bound(Opt(alpha=1.0), truth, target, truth).num_violations == 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny pair, and seven texts."""
    return write_pair(tmp_path_factory.mktemp("pair"))


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
    found = bounds(config(folder, tmp_path / "out", skip_prompts=5))
    assert len(found.prompts) == 2
    for skipped in (7, 1000):
        said = rf"corpus\.jsonl has 7 prompts and skip_prompts is {skipped:,}; lower it$"
        with pytest.raises(UsageError, match=said):
            bounds(config(folder, tmp_path / "none", skip_prompts=skipped))
    assert not (tmp_path / "none/manifest.json").exists()
