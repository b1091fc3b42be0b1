"""Narrower copies: exact where nothing that counts is lost, rightly chosen, refused by name."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.errors import UnsupportedModelError, UsageError
from paceline.models import CausalModel, load_model, prepare_for_decoding, wrap_model
from paceline.models.drafts.save import save_draft
from paceline.models.drafts.subclone import (
    Importance,
    Width,
    measure_importance,
    subclone,
    width_of,
)
from tiny import tiny_hf, tiny_model, tiny_tokenizer

TEXT = [5, 9, 3, 7, 11, 20, 30, 4, 8]
ARCHITECTURES = ["llama", "mistral", "qwen2", "qwen3"]


def logits_of(model: CausalModel) -> Tensor:
    with torch.inference_mode():
        return model.hf(input_ids=torch.tensor([TEXT]), use_cache=False).logits


def layers_of(model: CausalModel) -> Any:
    return model.hf.base_model.layers


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_draft_as_wide_as_its_target_is_its_target(architecture: str):
    target = tiny_model(architecture)
    draft = subclone(target, width_of(target), measure_importance(target, target, [TEXT]))
    assert torch.equal(logits_of(draft), logits_of(target))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_channels_that_carry_nothing_are_the_ones_to_go_and_nothing_changes(architecture: str):
    """The norms divide by the root mean square of fewer channels: scale has to make up for it."""
    hf = tiny_hf(architecture)
    silent = [3, 4, 17, 30, 31, 8, 9, 10]
    with torch.no_grad():
        hf.get_input_embeddings().weight[:, silent] = 0
        for layer in hf.base_model.layers:
            layer.self_attn.o_proj.weight[silent] = 0
            layer.mlp.down_proj.weight[silent] = 0
    target = wrap_model(hf)
    width = width_of(target)._replace(hidden=24)
    draft = subclone(target, width, measure_importance(target, target, [TEXT]))
    assert draft.hf.config.hidden_size == 24
    torch.testing.assert_close(logits_of(draft), logits_of(target), rtol=1e-3, atol=1e-4)


def scaled(hf: nn.Module, name: str, factor: float) -> CausalModel:
    with torch.no_grad():
        for layer in hf.base_model.layers:
            layer.get_submodule(name).weight *= factor
    return wrap_model(hf)


def test_inner_channels_that_carry_nothing_go_and_the_others_grow():
    hf = tiny_hf("llama")
    with torch.no_grad():
        for index, layer in enumerate(hf.base_model.layers):
            layer.mlp.down_proj.weight[:, index : index + 16] = 0
    target = wrap_model(hf)
    width = width_of(target)._replace(inner=32)
    draft = subclone(target, width, measure_importance(target, target, [TEXT]))
    wanted = logits_of(scaled(hf, "mlp.down_proj", math.sqrt(48 / 32)))
    torch.testing.assert_close(logits_of(draft), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("silent", "width"),
    [
        # one head of each pair
        ([0, 3], Width(32, 48, 2, 2)),
        # both heads of the first pair, and their keys with them
        ([0, 1], Width(32, 48, 2, 1)),
    ],
)
def test_heads_that_carry_nothing_go_with_the_keys_that_nobody_asks(
    silent: list[int], width: Width
):
    hf = tiny_hf("qwen3")
    with torch.no_grad():
        for layer in hf.base_model.layers:
            for head in silent:
                layer.self_attn.o_proj.weight[:, 8 * head : 8 * head + 8] = 0
    target = wrap_model(hf)
    draft = subclone(target, width, measure_importance(target, target, [TEXT]))
    assert layers_of(draft)[0].self_attn.k_proj.out_features == 8 * width.num_key_heads
    wanted = logits_of(scaled(hf, "self_attn.o_proj", math.sqrt(2)))
    torch.testing.assert_close(logits_of(draft), wanted, rtol=1e-4, atol=1e-5)


def test_importance_is_what_parts_add_to_the_stream():
    """Layer 0 by hand, from its own inputs; another road than hooks on the parts."""
    target = tiny_model("llama")
    got = measure_importance(target, target, [TEXT, [], TEXT[:4]])
    inputs: dict[str, list[Tensor]] = {"mlp": [], "attention": []}
    layer = layers_of(target)[0]
    layer.mlp.register_forward_hook(lambda _m, args, _o: inputs["mlp"].append(args[0][0]))
    layer.self_attn.o_proj.register_forward_hook(
        lambda _m, args, _o: inputs["attention"].append(args[0][0])
    )
    for text in (TEXT, TEXT[:4]):
        with torch.inference_mode():
            target.hf.base_model(input_ids=torch.tensor([text]), use_cache=False)
    mlp, attention = layer.mlp, torch.cat(inputs["attention"])
    states = torch.cat(inputs["mlp"])
    inner = nn.functional.silu(mlp.gate_proj(states)) * mlp.up_proj(states)
    for channel in (0, 7, 47):
        added = inner[:, channel, None] * mlp.down_proj.weight[:, channel]
        torch.testing.assert_close(got.inner_LI[0, channel], added.norm(dim=-1).mean())
    for head in range(4):
        part = slice(8 * head, 8 * head + 8)
        added = attention[:, part] @ layer.self_attn.o_proj.weight[:, part].T
        torch.testing.assert_close(got.heads_LH[0, head], added.norm(dim=-1).mean())


def test_a_narrow_draft_is_saved_loaded_and_decodes(tmp_path: Path):
    tokenizer = tiny_tokenizer()
    target = wrap_model(tiny_hf("llama", vocab_size=len(tokenizer)), tokenizer)
    importance = measure_importance(target, target, [TEXT])
    draft = subclone(target, Width(16, 32, 2, 1), importance)
    assert draft.num_parameters < target.num_parameters / 2
    target.hf.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    save_draft(draft, tmp_path / "target", tmp_path / "draft")
    again = load_model(tmp_path / "draft", dtype="float32")
    assert torch.equal(logits_of(again), logits_of(draft))
    ready = prepare_for_decoding(again).start_session()
    torch.testing.assert_close(
        ready.prefill([TEXT])[0], logits_of(draft)[0, -1], rtol=1e-3, atol=1e-3
    )


@pytest.mark.parametrize(
    ("width", "message"),
    [
        (Width(33, 48, 4, 2), "hidden of the draft is 33; wanted 1 to the target's 32"),
        (Width(32, 0, 4, 2), "inner of the draft is 0"),
        (Width(30, 48, 4, 2), "the hidden size 30 is not a multiple of 4 heads"),
        (Width(30, 48, 3, 2), "3 heads are not a multiple of 2 key heads"),
        (
            Width(32, 48, 4, 1),
            "4 heads for 1 key heads are more per key head than the target's 4 for 2",
        ),
    ],
)
def test_widths_that_cannot_be_are_refused(width: Width, message: str):
    target = tiny_model("llama")
    importance = Importance(torch.ones(32), torch.ones(4, 48), torch.ones(4, 4))
    with pytest.raises(UsageError, match=message):
        subclone(target, width, importance)


def test_other_architectures_and_no_text_are_refused():
    gpt2, llama = tiny_model("gpt2"), tiny_model("llama")
    with pytest.raises(UnsupportedModelError, match="gpt2 is neither Llama-like nor a T5"):
        measure_importance(gpt2, gpt2, [TEXT])
    with pytest.raises(UsageError, match="got no text to rank"):
        measure_importance(llama, llama, [])
