"""Head and loss in chunks against the plain loss in double precision."""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.core.divergences import forward_kl, jsd, negative_log_acceptance, reverse_kl, tvd
from paceline.core.fused import Head, chunked_loss

TOKENS, WIDTH, VOCABULARY = 23, 8, 31
chunks = pytest.mark.parametrize("chunk_size", [1, 3, 23, 1000])


class Case(NamedTuple):
    hidden: Tensor
    weight: Tensor
    bias: Tensor
    target_log_probs: Tensor
    weights: Tensor

    def grads(self) -> list[Tensor | None]:
        return [tensor.grad for tensor in (self.hidden, self.weight, self.bias)]


def make_case(dtype: torch.dtype, vocab_size: int = VOCABULARY, seed: int = 0) -> Case:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    weights = normal(TOKENS).abs()
    weights[::5] = 0
    return Case(
        normal(TOKENS, WIDTH).to(dtype).requires_grad_(),
        normal(VOCABULARY, WIDTH).to(dtype).requires_grad_(),
        normal(VOCABULARY).to(dtype).requires_grad_(),
        (2 * normal(TOKENS, vocab_size)).log_softmax(-1),
        weights,
    )


def plain_loss(
    case: Case, divergence: Callable[[Tensor, Tensor], Tensor], vocab_size: int = VOCABULARY
) -> Tensor:
    """Everything at once, in float64."""
    hidden, weight, bias = (part.double() for part in (case.hidden, case.weight, case.bias))
    logits = F.linear(hidden, weight, bias)[:, :vocab_size]
    return (divergence(case.target_log_probs, logits.log_softmax(-1)) * case.weights).sum()


def chunked(
    case: Case,
    divergence: Callable[[Tensor, Tensor], Tensor],
    chunk_size: int,
    vocab_size: int | None = None,
) -> Tensor:
    weights = case.weights.float()

    head = Head(case.weight, case.bias)

    def loss_of_chunk(hidden_CD: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        projected_CV = head.projected(hidden_CD)[:, :vocab_size].detach()
        with torch.enable_grad():
            projected_CV.requires_grad_(not torch.is_inference_mode_enabled())
            log_probs_CV = projected_CV.float().log_softmax(-1)
            losses_C = divergence(case.target_log_probs[rows].float(), log_probs_CV)
            total = (losses_C * weights[rows]).sum()
        if not total.requires_grad:
            return losses_C, torch.zeros_like(projected_CV)
        return losses_C.detach(), torch.autograd.grad(total, projected_CV)[0]

    return chunked_loss(
        case.hidden, head, loss_of_chunk, weights, chunk_size=chunk_size, vocab_size=vocab_size
    )


def assert_close(found: Tensor | None, expected: Tensor | None) -> None:
    assert found is not None
    assert expected is not None
    scale = max(1.0, float(expected.abs().max()))
    assert float((found.double() - expected.double()).abs().max()) < 1e-6 * scale


def assert_same_slopes(ours: Case, plain: Case, value: Tensor, expected: Tensor) -> None:
    value.backward()
    expected.backward()
    assert_close(value.detach(), expected.detach())
    for found, wanted in zip(ours.grads(), plain.grads(), strict=True):
        assert_close(found, wanted)


# trl#5731: the fused path must train the objective that was asked for.
@chunks
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("divergence", [forward_kl, reverse_kl, jsd, tvd, negative_log_acceptance])
def test_chunks_give_the_plain_loss_and_its_slopes(
    divergence: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype, chunk_size: int
):
    ours, plain = make_case(dtype), make_case(dtype)
    value, expected = chunked(ours, divergence, chunk_size), plain_loss(plain, divergence)
    assert_same_slopes(ours, plain, value, expected)


@chunks
def test_logits_beyond_the_vocabulary_are_sliced_off_and_get_no_slope(chunk_size: int):
    ours, plain = make_case(torch.float32, vocab_size=20), make_case(torch.float32, vocab_size=20)
    value, expected = chunked(ours, forward_kl, chunk_size, 20), plain_loss(plain, forward_kl, 20)
    assert_same_slopes(ours, plain, value, expected)
    assert ours.weight.grad is not None
    assert (ours.weight.grad[20:] == 0).all()


def test_slopes_scale_with_the_loss_add_up_over_calls_and_reach_where_hidden_states_came_from():
    ours, plain = make_case(torch.float32), make_case(torch.float32)
    scales = [torch.tensor(0.7, requires_grad=True) for _ in range(2)]
    scaled = [c._replace(hidden=c.hidden * x) for c, x in zip((ours, plain), scales, strict=True)]
    (3 * chunked(scaled[0], forward_kl, 7)).backward(retain_graph=True)
    (0.5 * chunked(scaled[0], tvd, 7)).backward()
    (3 * plain_loss(scaled[1], forward_kl) + 0.5 * plain_loss(scaled[1], tvd)).backward()
    for found, wanted in zip(ours.grads(), plain.grads(), strict=True):
        assert_close(found, wanted)
    assert_close(scales[0].grad, scales[1].grad)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_the_loss_can_be_evaluated_without_slopes(mode: Callable[[], torch.no_grad]):
    expected = plain_loss(make_case(torch.float32), forward_kl).detach()
    with mode():
        case = make_case(torch.float32)
        value = chunked(case, forward_kl, 4)
    assert_close(value, expected)
    assert not value.requires_grad
    assert case.grads() == [None, None, None]


def test_whole_logits_never_exist():
    widest = 0

    def loss_of_chunk(hidden_CD: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        nonlocal widest
        widest = max(widest, len(hidden_CD))
        return hidden_CD[:, 0], torch.zeros(len(hidden_CD), VOCABULARY)

    case = make_case(torch.float32)
    head = Head(case.weight, case.bias)
    chunked_loss(case.hidden, head, loss_of_chunk, case.weights.float(), chunk_size=4).backward()
    assert widest == 4


def test_sixteen_bit_hidden_states_get_slopes_of_their_own_kind():
    ours, plain = make_case(torch.bfloat16), make_case(torch.bfloat16)
    chunked(ours, forward_kl, 8).backward()
    plain_loss(plain, forward_kl).backward()
    for found, wanted in zip(ours.grads(), plain.grads(), strict=True):
        assert found is not None
        assert wanted is not None
        assert found.dtype == torch.bfloat16
        assert float((found - wanted).abs().max()) < 0.05 * max(1, float(wanted.abs().max()))
