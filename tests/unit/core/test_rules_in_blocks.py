"""Verified blocks at ties, thresholds and ends of rules, in C and in PyTorch.

The shares of all rules: `statistical/test_borders.py`.
"""

import math
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from paceline.core.block import Drafted, Uniforms, Verified, verify, verify_greedy
from paceline.core.rule_base import Position
from paceline.core.rules import (
    BiLDRule,
    Lenient,
    Lossless,
    Lossy,
    Rule,
)
from paceline.core.sampling import UNTEMPERED, SamplingParams, sample, to_probs
from paceline.native.kernels import NativeBackend
from support.rules import PYTORCH, using


@pytest.fixture(autouse=True, params=[NativeBackend(), PYTORCH], ids=["native", "torch"])
def backend(request: pytest.FixtureRequest) -> Iterator[None]:
    with using(request.param):
        yield


class Case(NamedTuple):
    drafted_BG: Tensor
    num_drafted_B: Tensor
    draft_BHV: Tensor
    target_BHV: Tensor
    accept_BG: Tensor
    next_B: Tensor
    target_raw_BHV: Tensor | None = None
    draft_raw_BHV: Tensor | None = None


@cache
def make_case(batch: int, gamma: int, vocab_size: int, temperature: float) -> Case:
    """The draft knows fewer tokens, and every seventh row's models are the same."""
    rng = torch.Generator().manual_seed(vocab_size + gamma)
    shape = (batch, gamma + 1, vocab_size)
    target = torch.randn(shape, generator=rng)
    draft = target + 0.8 * torch.randn(shape, generator=rng)
    holes = torch.rand(shape, generator=rng) < 0.3
    holes[..., 0] = False
    draft = draft.masked_fill(holes, -torch.inf)
    draft[::7] = target[::7]
    params = SamplingParams(temperature=temperature)
    probs = to_probs(draft, params), to_probs(target, params)
    raws = (None, None)
    if temperature != 1:
        raws = to_probs(target, UNTEMPERED), to_probs(draft, UNTEMPERED)
    drawing = torch.rand(gamma, batch, generator=rng)
    drafted = [sample(probs[0][:, g].contiguous(), drawing[g]) for g in range(gamma)]
    return Case(
        torch.stack(drafted, 1) if gamma else torch.zeros(batch, 0, dtype=torch.int64),
        torch.randint(gamma + 1, (batch,), generator=rng),
        *probs,
        torch.rand(batch, gamma, generator=rng, dtype=torch.float64),
        torch.rand(batch, generator=rng, dtype=torch.float64),
        *raws,
    )


def verified(rule: Rule, case: Case) -> Verified:
    gamma = case.drafted_BG.shape[1]
    places = gamma + rule.needs_draft_at_bonus
    raw_BHV = case.draft_raw_BHV
    drafted = Drafted(
        case.drafted_BG,
        case.draft_BHV[:, :places].contiguous(),
        None if raw_BHV is None else raw_BHV[:, :places].contiguous(),
    )
    uniforms = Uniforms(case.accept_BG, case.next_B)
    return verify(drafted, case.num_drafted_B, case.target_BHV, rule, uniforms, case.target_raw_BHV)


def test_tokens_at_the_threshold_or_with_the_same_mass_are_kept():
    """Powers of two, so that f(p) equals max p to the last bit."""
    raw = torch.tensor([0.25, 0.25, 0.125, 0.0625, 0.25, 0.0625])
    one_hot = torch.tensor([1.0, 0, 0, 0, 0, 0])
    rules: dict[Rule, list[int]] = {
        Lenient("linear", 0.5): [1, 1, 1, 0, 1, 0],
        Lenient("square", 0.5): [1, 1, 1, 1, 1, 1],
        Lenient("exponential", 0.5): [1, 1, 1, 1, 1, 1],
        Lossy(0.5, "tuned"): [1, 1, 1, 0, 1, 0],
        Lossy(0.0, "tuned"): [1, 0, 0, 0, 0, 0],
    }
    size = len(raw)
    case = Case(
        torch.arange(size)[:, None],
        torch.ones(size, dtype=torch.int64),
        torch.full((size, 2, size), 1 / size),
        one_hot.expand(size, 2, -1).contiguous(),
        torch.full((size, 1), 1 - 1e-9, dtype=torch.float64),
        torch.full((size,), 0.4, dtype=torch.float64),
        raw.expand(size, 2, -1).contiguous(),
    )
    for rule, wanted in rules.items():
        assert verified(rule, case).num_accepted.tolist() == wanted, rule


def test_surprise_is_a_logarithm_to_seven_digits():
    """p untempered from the smallest number there is to 1, each under and over its threshold."""
    small = (2.0 ** torch.arange(-149, 0, 3)).tolist()
    for mass in [*small, *torch.linspace(0.01, 1, 200).tolist()]:
        surprise = -math.log(mass)
        assert not rejects(BiLDRule(surprise * (1 + 2e-7) + 1e-12), mass), mass
        if mass < 1:
            assert rejects(BiLDRule(surprise * (1 - 2e-7)), mass), mass
    assert rejects(BiLDRule(1e300), 0.0)


def rejects(rule: Rule, raw_mass: float) -> bool:
    """Is a token that the target would never say sent back, whose untempered mass is this?"""
    one = torch.tensor([[[0.0, 1.0], [1.0, 0.0]]])
    raw = torch.tensor([[[1 - raw_mass, raw_mass], [0.5, 0.5]]])
    half = torch.tensor([[0.5]])
    case = Case(torch.tensor([[1]]), torch.tensor([1]), one, 1 - one, half, half[0], raw, one)
    return verified(rule, case).num_accepted.item() == 0


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


def test_what_lies_beyond_a_rows_own_draft_is_never_looked_at():
    case = make_case(60, 4, 5, 1.0)
    clean = verified(Lossless(), case)
    broken = [part.clone() for part in case[:5] if part is not None]
    drafted, _, draft, target, uniforms = broken
    for row, count in enumerate(case.num_drafted_B.tolist()):
        draft[row, count:] = math.nan
        target[row, count + 1 :] = math.nan
        drafted[row, count:] = 0
        uniforms[row, count:] = 0
    dirty = verified(Lossless(), Case(*broken, case.next_B))
    assert all(torch.equal(*parts) for parts in zip(clean, dirty, strict=True))


def test_the_inputs_stay_as_they_were():
    case = make_case(20, 3, 4, 1.0)
    before = [part.clone() for part in case[:6] if part is not None]
    verified(Lossless(), case)
    assert all(torch.equal(now, then) for now, then in zip(case[:6], before, strict=True))


# transformers#28508: equal distributions leave no residual, and never NaN.
def test_equal_distributions_are_kept_whole_whatever_the_uniforms():
    case = make_case(50, 4, 8, 1.0)
    same = case._replace(
        target_BHV=case.draft_BHV,
        num_drafted_B=torch.full((50,), 4),
        accept_BG=torch.full((50, 4), 1 - 2**-53, dtype=torch.float64),
    )
    assert (verified(Lossless(), same).num_accepted == 4).all()


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
    assert verdict.num_accepted.tolist() == [1] * rows
    assert verdict.next_tokens.bincount().tolist() == [100, 200, 700]
