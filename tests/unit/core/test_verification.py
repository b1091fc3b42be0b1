"""A batch of blocks against a plain triple loop; every number in it drawn from a fixed seed."""

import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from paceline.core.block import Drafted, Uniforms, Verified, verify, verify_greedy
from paceline.core.rule_base import Position
from paceline.core.rules import Lenient, Lossless, Lossy, Rule
from support import exact

RULES: list[tuple[Rule, exact.RuleVectors]] = [
    (Lossless(), exact.lossless),
    (Lenient("linear", 0.4), exact.lenient("linear", 0.4)),
    (Lenient("exponential", 0.5), exact.lenient("exponential", 0.5)),
    (Lossy(0.3, 1.4), exact.lossy(0.3, 1.4)),
]


class Case(NamedTuple):
    drafted_BG: Tensor
    num_drafted_B: Tensor
    draft_probs_BGV: Tensor
    target_probs_BHV: Tensor
    accept_BG: Tensor
    next_B: Tensor


def make_case(batch: int, gamma: int, vocab_size: int, seed: int, *, sparse: bool) -> Case:
    generator = torch.Generator().manual_seed(seed)
    target = torch.randn(batch, gamma + 1, vocab_size, generator=generator)
    draft = target[:, :gamma] + torch.randn(batch, gamma, vocab_size, generator=generator)
    if sparse:
        target = target.masked_fill(target < target.median(-1, keepdim=True).values, -math.inf)
    draft_probs = draft.softmax(-1)
    drafted = torch.zeros(batch, gamma, dtype=torch.int64)
    for row in range(batch):
        for position in range(gamma):
            drafted[row, position] = torch.multinomial(
                draft_probs[row, position], 1, generator=generator
            )
    return Case(
        drafted,
        torch.randint(0, gamma + 1, (batch,), generator=generator),
        draft_probs,
        target.softmax(-1),
        torch.rand(batch, gamma, generator=generator, dtype=torch.float64),
        torch.rand(batch, generator=generator, dtype=torch.float64),
    )


def run(case: Case, rule: Rule) -> Verified:
    drafted = Drafted(case.drafted_BG, case.draft_probs_BGV)
    uniforms = Uniforms(case.accept_BG, case.next_B)
    return verify(drafted, case.num_drafted_B, case.target_probs_BHV, rule, uniforms)


@pytest.mark.parametrize("gamma", [0, 1, 4])
def test_greedy_verification_is_the_general_one_on_one_hot_distributions(gamma: int):
    generator = torch.Generator().manual_seed(gamma)
    best_BH = torch.randint(3, (200, gamma + 1), generator=generator)
    drafted_BG = torch.randint(3, (200, gamma), generator=generator)
    num_drafted_B = torch.randint(gamma + 1, (200,), generator=generator)
    uniforms = torch.rand(200, gamma + 1, generator=generator, dtype=torch.float64)
    wanted = verify(
        Drafted(drafted_BG, torch.nn.functional.one_hot(drafted_BG, 3).float()),
        num_drafted_B,
        torch.nn.functional.one_hot(best_BH, 3).float(),
        Lossless(),
        Uniforms(uniforms[:, 1:], uniforms[:, 0]),
    )
    for got, expected in zip(
        verify_greedy(drafted_BG, num_drafted_B, best_BH), wanted, strict=True
    ):
        assert torch.equal(got, expected)


def judge_by_hand(case: Case, vectors: exact.RuleVectors, row: int) -> tuple[int, int]:
    """One row: position by position, token by token."""
    accepted = 0
    weights: list[float] = case.target_probs_BHV[row, int(case.num_drafted_B[row])].tolist()
    for position in range(int(case.num_drafted_B[row])):
        at = row, position
        p, q = case.target_probs_BHV[at].tolist(), case.draft_probs_BGV[at].tolist()
        accept, recover = vectors(p, q)
        if float(case.accept_BG[row, position]) >= accept[int(case.drafted_BG[row, position])]:
            weights = recover
            break
        accepted += 1
    point = float(case.next_B[row]) * math.fsum(weights)
    passed = 0.0
    for token, weight in enumerate(weights):
        passed += weight
        if point < passed:
            return accepted, token
    raise AssertionError("the point lies beyond the total")


@pytest.mark.parametrize(("rule", "vectors"), RULES, ids=[str(rule) for rule, _ in RULES])
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("gamma", [1, 2, 5])
def test_a_batch_equals_a_loop_over_rows_positions_and_tokens(
    rule: Rule, vectors: exact.RuleVectors, gamma: int, *, sparse: bool
):
    case = make_case(batch=150, gamma=gamma, vocab_size=6, seed=gamma, sparse=sparse)
    verdict = run(case, rule)
    found = list(zip(*(part.tolist() for part in verdict), strict=True))
    assert found == [judge_by_hand(case, vectors, row) for row in range(150)]
    assert len({accepted for accepted, _ in found}) == gamma + 1


def test_what_lies_beyond_a_rows_own_draft_is_never_looked_at():
    case = make_case(batch=60, gamma=4, vocab_size=5, seed=9, sparse=False)
    clean = run(case, Lossless())
    draft, target = case.draft_probs_BGV.clone(), case.target_probs_BHV.clone()
    drafted, uniforms = case.drafted_BG.clone(), case.accept_BG.clone()
    for row, count in enumerate(case.num_drafted_B.tolist()):
        draft[row, count:] = math.nan
        target[row, count + 1 :] = math.nan
        drafted[row, count:] = 0
        uniforms[row, count:] = 0
    dirty = run(Case(drafted, case.num_drafted_B, draft, target, uniforms, case.next_B), Lossless())
    for ours, theirs in zip(clean, dirty, strict=True):
        assert torch.equal(ours, theirs)


def test_a_sure_token_survives_the_largest_uniform_and_an_impossible_one_falls_to_zero():
    draft = torch.tensor([[[0.5, 0.5]], [[0.5, 0.5]]])
    target = torch.tensor([[[0.5, 0.5], [1.0, 0.0]], [[0.0, 1.0], [1.0, 0.0]]])
    verdict = verify(
        Drafted(torch.zeros(2, 1, dtype=torch.int64), draft),
        torch.ones(2, dtype=torch.int64),
        target,
        Lossless(),
        Uniforms(torch.tensor([[1 - 2**-53], [0.0]], dtype=torch.float64), torch.zeros(2)),
    )
    assert verdict.num_accepted_B.tolist() == [1, 0]


def test_the_inputs_stay_as_they_were():
    case = make_case(batch=20, gamma=3, vocab_size=4, seed=2, sparse=False)
    before = [part.clone() for part in case]
    run(case, Lossless())
    assert all(torch.equal(now, then) for now, then in zip(case, before, strict=True))


# transformers#28508: equal distributions leave no residual, and never NaN.
def test_equal_distributions_are_kept_whole_whatever_the_uniforms():
    case = make_case(batch=50, gamma=4, vocab_size=8, seed=3, sparse=True)
    same = case._replace(
        draft_probs_BGV=case.target_probs_BHV[:, :4],
        drafted_BG=case.target_probs_BHV[:, :4].argmax(-1),
        num_drafted_B=torch.full((50,), 4),
        accept_BG=torch.full((50, 4), 1 - 2**-53, dtype=torch.float64),
    )
    verdict = run(same, Lossless())
    assert (verdict.num_accepted_B == 4).all()


class RecoversFromConfidences(Rule):
    """Keeps a quarter of every token's drafts; recovers from what the untempered models say."""

    uses_confidence = True

    def accept_at(self, at: Position) -> Tensor:
        return torch.full_like(at.target, 0.25)

    def residual_at(self, at: Position) -> Tensor:
        return 0.5 * at.target_raw + 0.5 * at.draft_raw


def test_a_residual_that_uses_confidences_is_given_the_untempered_distributions_of_its_position():
    """On a grid of uniforms. Position 1 of two rejects; its raw rows mix to (0.1, 0.2, 0.7)."""
    rows, other = 1000, [0.8, 0.1, 0.1]
    target_raw = torch.tensor([other, [0.2, 0.3, 0.5], other]).expand(rows, 3, 3)
    draft_raw = torch.tensor([other, [0.0, 0.1, 0.9]]).expand(rows, 2, 3)
    verdict = verify(
        Drafted(
            torch.zeros(rows, 2, dtype=torch.int64), torch.full((rows, 2, 3), 1 / 3), draft_raw
        ),
        torch.full((rows,), 2),
        torch.full((rows, 3, 3), 1 / 3),
        RecoversFromConfidences(),
        Uniforms(
            torch.tensor([0.2, 0.3]).expand(rows, 2),
            (torch.arange(rows, dtype=torch.float64) + 0.5) / rows,
        ),
        target_raw,
    )
    assert verdict.num_accepted_B.tolist() == [1] * rows
    assert verdict.next_tokens_B.bincount().tolist() == [100, 200, 700]
