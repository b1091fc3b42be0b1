"""The fused training pass of T5-like models gives the states and gradients of transformers."""

from typing import Any

import pytest
import torch

from paceline.errors import SlowerWarning
from paceline.models import HfModel, t5, wrap_model
from paceline.models.contract import Texts, pad
from paceline.models.llama.packing import merged_product
from paceline.models.prepare import prepare_for_training
from paceline.models.t5 import T5Pass, T5States
from paceline.train.weights import train_all
from support.models import tiny_hf as made_by_transformers

T5_LIKE = ["t5", "t5_v1_1", "umt5"]  # mt5 is t5_v1_1 by another name
TEXTS = pad([[0, 7, 9, 3], [0, 30], [0, 4, 17, 22, 8, 5, 50]])
SOURCES = pad([[5, 9, 12, 40, 33, 8, 7], [30], [4, 17, 22]])
BATCH = Texts(TEXTS.tokens_BT, TEXTS.attention_BT, SOURCES)
assert TEXTS.attention_BT is not None
MASK_BT = TEXTS.attention_BT.bool()


@torch.no_grad()
def tiny_hf(architecture: str) -> Any:
    """A model with weights of our own: those that transformers draws vary with its version."""
    hf = made_by_transformers(architecture)
    rng = torch.Generator().manual_seed(0)
    for weight in hf.parameters():
        if weight.ndim == 1:  # a norm
            weight.copy_(0.8 + 0.4 * torch.rand(weight.shape, generator=rng))
        else:
            spread = 0.6 / weight.shape[1] ** 0.5
            weight.copy_(spread * torch.randn(weight.shape, generator=rng))
    return hf


def tiny_model(architecture: str) -> HfModel:
    return wrap_model(tiny_hf(architecture))


def states_and_gradients(model: HfModel, dtype: torch.dtype) -> tuple[torch.Tensor, dict[str, Any]]:
    """Hidden states of real tokens, and gradients of a function of them."""
    train_all(model)
    model.hf.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        hidden_ND = model.hidden(BATCH)[MASK_BT]
    weights = torch.randn(hidden_ND.shape, generator=torch.Generator().manual_seed(0))
    (hidden_ND * weights).sum().backward()
    return hidden_ND.detach(), {name: w.grad for name, w in model.hf.named_parameters()}


def fused(hf: Any) -> HfModel:
    model = prepare_for_training(wrap_model(hf))
    assert isinstance(model.states, T5States)
    return model


@pytest.mark.parametrize("architecture", [*T5_LIKE, "mt5"])
def test_states_and_gradients_are_those_of_transformers(architecture: str):
    wanted_ND, wanted = states_and_gradients(tiny_model(architecture), torch.float32)
    got_ND, got = states_and_gradients(fused(tiny_hf(architecture)), torch.float32)
    torch.testing.assert_close(got_ND, wanted_ND, rtol=1e-4, atol=1e-5)
    assert any(gradient is not None for gradient in wanted.values())
    for name, gradient in wanted.items():
        assert (got[name] is None) == (gradient is None), name
        if gradient is not None:
            torch.testing.assert_close(got[name], gradient, rtol=1e-3, atol=1e-4, msg=name)


def test_in_bfloat16_gradients_are_as_near_to_float32_as_those_of_transformers():
    _, exact = states_and_gradients(tiny_model("t5_v1_1"), torch.float32)
    _, theirs = states_and_gradients(tiny_model("t5_v1_1"), torch.bfloat16)
    _, ours = states_and_gradients(fused(tiny_hf("t5_v1_1")), torch.bfloat16)
    used = [name for name, gradient in exact.items() if gradient is not None]

    def error(found: dict[str, Any]) -> float:
        return sum(float((found[name] - exact[name]).square().sum()) for name in used) ** 0.5

    assert error(ours) <= 1.2 * error(theirs)


def test_states_follow_the_weights():
    model = fused(tiny_hf("t5_v1_1"))
    plain = wrap_model(model.hf)
    with torch.no_grad():
        for weight in model.hf.parameters():
            weight *= 1.1
        wanted, got = (each.hidden(BATCH)[MASK_BT] for each in (plain, model))
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("architecture", T5_LIKE)
def test_states_of_a_frozen_target_are_those_of_transformers(architecture: str):
    wanted = tiny_model(architecture).hidden(BATCH)[MASK_BT]
    target = prepare_for_training(wrap_model(tiny_hf(architecture)), frozen=True)
    torch.testing.assert_close(target.hidden(BATCH)[MASK_BT], wanted, rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("architecture", T5_LIKE)
def test_states_of_a_target_in_bfloat16_are_as_near_to_float32_as_those_of_transformers(
    architecture: str,
):
    rounded = tiny_hf(architecture).bfloat16()
    theirs = wrap_model(rounded).hidden(BATCH)[MASK_BT]
    target = prepare_for_training(wrap_model(rounded), frozen=True)
    ours = target.hidden(BATCH)[MASK_BT]
    assert ours.dtype == theirs.dtype == torch.bfloat16
    exact = wrap_model(rounded.float()).hidden(BATCH)[MASK_BT]
    assert (ours - exact).square().sum() <= 1.2 * (theirs - exact).square().sum()


@torch.no_grad()
def test_preparing_for_both_keeps_both():
    """The same weights are merged twice, and stored once."""
    target = prepare_for_training(wrap_model(tiny_hf("t5_v1_1").bfloat16()), frozen=True)
    decoder: Any = target.hf.get_decoder()
    query = decoder.block[0].layer[0].SelfAttention.q
    stored = query.weight.data_ptr()
    wanted = target.hidden(BATCH)[MASK_BT]
    decoding = target.decoding_with(T5Pass(target.hf, merged_product))
    assert isinstance(decoding.decoder, T5Pass)
    assert decoding.states is target.states
    assert query.weight.data_ptr() == stored
    again = prepare_for_training(decoding, frozen=True)
    assert again.decoder is decoding.decoder
    assert torch.equal(again.hidden(BATCH)[MASK_BT], wanted)
    assert torch.equal(target.hidden(BATCH)[MASK_BT], wanted)


def test_other_models_are_returned_unchanged():
    for model in (tiny_model("llama"), tiny_model("bart")):
        assert prepare_for_training(model) is model


def test_states_that_differ_from_transformers_are_not_used(monkeypatch: pytest.MonkeyPatch):
    both_ways: Any = t5.Positions.both_ways
    monkeypatch.setattr(t5.Positions, "both_ways", lambda *given: 3 * both_ways(*given))
    model = tiny_model("t5")
    with pytest.warns(SlowerWarning, match="hidden states that differ from transformers by"):
        assert prepare_for_training(model) is model


def test_a_pass_that_fails_is_not_used(monkeypatch: pytest.MonkeyPatch):
    def fail(*_: Any) -> Any:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(T5States, "__call__", fail)
    model = tiny_model("t5")
    with pytest.warns(SlowerWarning, match=r"training pass failed \(no such kernel\) for this t5"):
        assert prepare_for_training(model) is model
