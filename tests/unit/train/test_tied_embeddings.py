"""A tied embedding's gradient, left where it is, against autograd's own."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import pytest
import torch
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.models import wrap_model
from paceline.train.weights import rows_added_in_place

if TYPE_CHECKING:
    from torch import Tensor

TOKENS_BT = torch.tensor([[1, 2, 0, 3], [2, 2, 5, 0]])


def model(*, tied: bool = True, padding: int | None = None) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=11,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=tied,
        pad_token_id=padding,
    )
    return LlamaForCausalLM(config).double()


def gradients(hf: LlamaForCausalLM) -> dict[str, Tensor]:
    return {name: p.grad for name, p in hf.named_parameters() if p.grad is not None}


def learn(hf: LlamaForCausalLM, tokens_BT: Tensor) -> None:
    logits = hf(input_ids=tokens_BT, use_cache=False).logits
    F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens_BT[:, 1:].flatten()).backward()


@pytest.mark.parametrize("padding", [None, 0])
@pytest.mark.parametrize("tied", [True, False])
def test_gradients_are_those_of_autograd(tied: bool, padding: int | None):
    ours = model(tied=tied, padding=padding)
    plain = copy.deepcopy(ours)
    for tokens_BT in (TOKENS_BT, TOKENS_BT.flip(1)):  # the second adds to the first
        with rows_added_in_place(wrap_model(ours)):
            learn(ours, tokens_BT)
        learn(plain, tokens_BT)
    torch.testing.assert_close(gradients(ours), gradients(plain), rtol=1e-12, atol=1e-12)


def test_rows_are_added_without_a_matrix_of_their_own():
    hf = model()
    assert "EmbeddingBackward0" in nodes(hf(input_ids=TOKENS_BT, use_cache=False).logits)
    with rows_added_in_place(wrap_model(hf)):
        logits = hf(input_ids=TOKENS_BT, use_cache=False).logits
    assert "EmbeddingBackward0" not in nodes(logits)


def nodes(result: Tensor) -> set[str]:
    """Names of the steps that autograd would take back."""
    found = {result.grad_fn}
    waiting = [result.grad_fn]
    while waiting:
        parents = {parent for parent, _ in waiting.pop().next_functions if parent} - found
        found |= parents
        waiting += parents
    return {node.name() for node in found}


def test_only_passes_in_here_are_changed():
    hf, plain = model(), model()
    with rows_added_in_place(wrap_model(hf)):
        pass
    learn(hf, TOKENS_BT)
    learn(plain, TOKENS_BT)
    torch.testing.assert_close(gradients(hf), gradients(plain), rtol=0, atol=0)


def test_frozen_embeddings_get_no_gradient():
    hf = model()
    hf.get_input_embeddings().requires_grad_(False)
    with rows_added_in_place(wrap_model(hf)):
        learn(hf, TOKENS_BT)
    assert hf.get_input_embeddings().weight.grad is None
