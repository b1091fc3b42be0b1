"""Divergences over recorded tokens and a tail: by hand, and against the whole vocabulary."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from paceline.core import divergences
from paceline.core.top_k_tail import (
    OUTSIDE,
    UNUSED,
    TopScores,
    among,
    coarsened,
    log_coverage,
)

Divergence = Callable[[Tensor, Tensor], Tensor]

DIVERGENCES: list[Divergence] = [
    divergences.forward_kl,
    divergences.reverse_kl,
    divergences.jsd,
    divergences.tvd,
    divergences.negative_log_acceptance,
]


def random_log_probs(seed: int, count: int, vocab_size: int) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(count, vocab_size, generator=rng)).log_softmax(-1)


def top_of(log_probs_CV: Tensor, k: int) -> TopScores:
    values, tokens = log_probs_CV.topk(k)
    return TopScores(tokens, values)


def test_three_tokens_by_hand():
    target, draft = [0.5, 0.3, 0.2], [0.2, 0.2, 0.6]
    top = TopScores(torch.tensor([[0]]), torch.tensor([[math.log(0.5)]]))
    both = coarsened(top, torch.tensor([draft]).log())
    torch.testing.assert_close(both[0].exp(), torch.tensor([[target[0], 0.5]]))
    torch.testing.assert_close(both[1].exp(), torch.tensor([[draft[0], 0.8]]))
    expected = 0.5 * math.log(0.5 / 0.2) + 0.5 * math.log(0.5 / 0.8)
    assert float(divergences.forward_kl(*both)) == pytest.approx(expected, abs=1e-6)
    assert float(divergences.tvd(*both)) == pytest.approx(0.3, abs=1e-6)


def test_tokens_outside_of_the_drafts_vocabulary_by_hand():
    """The draft proposes tokens 3 and 0 of 5; tokens 0, 1 and 4 of the target are recorded."""
    log_probs = torch.tensor([[0.5, 0.2, 0.1, 7.0]]).log()
    top = TopScores(torch.tensor([[0, 1, 4, UNUSED]]), log_probs)
    inside = among(top, torch.tensor([3, 0]), 5)
    assert inside.tokens_NK.tolist() == [[1, OUTSIDE, OUTSIDE, UNUSED]]
    assert float(log_coverage(inside).exp()) == pytest.approx(0.7)
    target, draft = coarsened(inside, torch.tensor([[0.4, 0.6]]).log())
    assert target.exp().tolist()[0] == pytest.approx([0.5 / 0.7, 0, 0, 0, 0.2 / 0.7], abs=1e-6)
    assert draft.exp().tolist()[0] == pytest.approx([0.6, 0, 0, 0, 0.4], abs=1e-6)
    assert float(log_coverage(top)) == 0, "without a vocabulary of its own, nothing is outside"


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_all_tokens_give_the_whole_loss_and_gradient(divergence: Divergence):
    target_CV = random_log_probs(0, 5, 40)
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(1))
    found = []
    for coarse in (False, True):
        leaf = logits.clone().requires_grad_()
        given_ = target_CV, leaf.log_softmax(-1)
        if coarse:
            given_ = coarsened(top_of(target_CV, 40), given_[1])
        loss_C = divergence(*given_)
        loss_C.sum().backward()
        assert leaf.grad is not None
        found.append((loss_C.detach(), leaf.grad))
    for whole, coarse in zip(*found, strict=True):
        torch.testing.assert_close(coarse, whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("divergence", DIVERGENCES)
@given(seed=st.integers(0, 10**6), k=st.integers(1, 11))
def test_fewer_tokens_give_at_most_the_whole_loss_and_more_give_more(
    divergence: Divergence, seed: int, k: int
):
    """Data processing: merging outcomes does not raise a divergence."""
    target, draft = (random_log_probs(seed + i, 3, 12).double() for i in range(2))
    target, draft = target.log_softmax(-1), draft.log_softmax(-1)
    sizes = [k, k + 1, 12]
    losses = [divergence(*coarsened(top_of(target, size), draft)) for size in sizes]
    whole = divergence(target, draft)
    assert (losses[0] <= losses[1] + 1e-5).all()
    assert (losses[1] <= losses[2] + 1e-5).all()
    torch.testing.assert_close(losses[2], whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_unused_entries_change_nothing_and_have_no_gradient(divergence: Divergence):
    target = random_log_probs(5, 2, 12)
    top = top_of(target, 3)
    padded = TopScores(
        torch.nn.functional.pad(top.tokens_NK, (0, 2), value=-1),
        torch.nn.functional.pad(top.log_probs_NK, (0, 2)),
    )
    gradients = []
    for scores in (top, padded):
        leaf = random_log_probs(6, 2, 12).requires_grad_()
        loss = divergence(*coarsened(scores, leaf.log_softmax(-1)))
        loss.sum().backward()
        assert leaf.grad is not None
        gradients.append((loss.detach(), leaf.grad))
    for plain, filled in zip(*gradients, strict=True):
        torch.testing.assert_close(filled, plain)
