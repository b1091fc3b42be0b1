"""Packed weights: the same numbers from half the memory, or not at all."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from paceline.errors import UsageError
from paceline.models import prepare_for_decoding, wrap_model
from paceline.models.llama.packing import (
    EXACT,
    ROUNDED,
    Packer,
    can_pack,
    half_precision_change,
    packed_copy,
)
from support.models import CONFIGS, tiny_hf

pytestmark = pytest.mark.skipif(not can_pack(), reason="FBGEMM packs weights on x86 only")


def linear(out: int, into: int, dtype: torch.dtype, *, bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(into, out, bias=bias).to(dtype).to(torch.float32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("out", "rows"),
    # one thread; one, and several from two rows on; several
    [(7, 5), (4_000, 1), (4_000, 40), (8_200, 5)],
)
def test_a_16_bit_layer_is_packed_without_a_difference(dtype: torch.dtype, rows: int, out: int):
    layer = linear(out, 64, dtype)
    packer = Packer(EXACT)
    x = torch.randn(2, rows, 64)
    torch.testing.assert_close(packer([layer])(x), layer(x), rtol=1e-5, atol=1e-5)
    assert packer.num_packed == 1


def test_layers_side_by_side_give_their_outputs_side_by_side():
    layers = [linear(6, 8, torch.float16), linear(4, 8, torch.float16, bias=False)]
    x = torch.randn(3, 8)
    wanted = torch.cat([layer(x) for layer in layers], -1)
    torch.testing.assert_close(Packer(EXACT)(layers)(x), wanted, rtol=1e-5, atol=1e-5)


def test_the_transposed_layers_of_gpt2_are_understood():
    layer = Conv1D(6, 8)
    with torch.no_grad():
        layer.weight.copy_(layer.weight.half().float())
    x = torch.randn(3, 8)
    torch.testing.assert_close(Packer(EXACT)([layer])(x), layer(x), rtol=1e-5, atol=1e-5)


def test_float32_weights_stay_unless_rounding_is_asked_for():
    layer, x = linear(6, 64, torch.float32), torch.randn(3, 64)
    exact, rounded = Packer(EXACT), Packer(ROUNDED)
    assert torch.equal(exact([layer])(x), F.linear(x, layer.weight, layer.bias))
    assert exact.num_packed == 0
    torch.testing.assert_close(rounded([layer])(x), layer(x), rtol=1e-2, atol=1e-3)
    assert (rounded.num_packed, rounded.largest_change <= ROUNDED) == (1, True)


def test_weights_beyond_float16_are_never_packed():
    layer = linear(6, 8, torch.float16)
    with torch.no_grad():
        layer.weight[2, 3] = 70_000.0
    packer = Packer(ROUNDED)
    assert torch.equal(packer([layer])(torch.ones(1, 8)), layer(torch.ones(1, 8)))
    assert packer.num_packed == 0


def test_the_change_is_relative_to_the_largest_weight():
    assert half_precision_change(torch.tensor([[1.0, 2.0**-30]])) == 2.0**-30
    assert half_precision_change(torch.tensor([[4.0, 1.0 + 2.0**-11]])) == 2.0**-13
    assert half_precision_change(torch.zeros(2, 2)) == 0.0
    assert half_precision_change(torch.tensor([[1e5]])) == float("inf")


@pytest.mark.parametrize("architecture", CONFIGS)
def test_a_packed_copy_shares_all_but_its_linear_layers(architecture: str):
    hf = tiny_hf(architecture)
    before = copy.deepcopy(hf.state_dict())
    packed = packed_copy(hf, Packer(ROUNDED))
    assert not [m for m in packed.modules() if isinstance(m, nn.Linear | Conv1D)]
    assert {id(weight) for weight in packed.parameters()} == {id(w) for w in hf.parameters()}
    for name, weight in hf.state_dict().items():
        assert torch.equal(weight, before[name])


def test_preparing_follows_the_checkpoint_and_leaves_training_alone():
    trained = wrap_model(tiny_hf("llama"))
    assert prepare_for_decoding(trained) is trained
    stored = wrap_model(tiny_hf("llama").bfloat16().float())
    prepared = prepare_for_decoding(stored)
    assert prepared is not stored
    assert prepared.hf is stored.hf
    assert prepare_for_decoding(stored, "plain") is stored
    assert prepare_for_decoding(trained, "packed_fp16") is not trained


def test_packing_a_16_bit_model_is_refused_with_a_reason():
    model = wrap_model(tiny_hf("llama").to(torch.bfloat16))
    assert prepare_for_decoding(wrap_model(tiny_hf("llama").half())).dtype == torch.float16
    with pytest.raises(UsageError, match="the model is bfloat16 on cpu; use weights=auto"):
        prepare_for_decoding(model, "packed_fp16")
