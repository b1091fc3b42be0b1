"""Narrower copies: exact where nothing that counts is lost, rightly chosen, refused by name."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.errors import UnsupportedModelError, UsageError
from paceline.models import HfModel, load_model, prepare_for_decoding, wrap_model
from paceline.models.drafts.save import save_draft
from paceline.models.drafts.subclone import (
    Importance,
    Width,
    measure_importance,
    subclone,
    width_of,
    width_with,
)
from support.models import tiny_hf, tiny_model, tiny_tokenizer

TEXT = [5, 9, 3, 7, 11, 20, 30, 4, 8]
TEXTS = [TEXT, [], [12, 40]]
LLAMA_LIKE = ["llama", "qwen2", "qwen3"]


def logits_of(model: HfModel) -> Tensor:
    with torch.inference_mode():
        return model.plain_logits(model.trial_batch(TEXT))


def narrowed(target: HfModel, width: Width) -> HfModel:
    return subclone(target, width, measure_importance(target, TEXTS))


def attentions_of(hf: Any) -> list[Any]:
    """Output projections of attention."""
    return [layer.self_attn.o_proj for layer in hf.base_model.layers]


def mlps_of(hf: Any) -> list[Any]:
    """Output projections of MLPs."""
    return [layer.mlp.down_proj for layer in hf.base_model.layers]


@pytest.mark.parametrize("architecture", [*LLAMA_LIKE, "mistral"])
def test_a_draft_as_wide_as_its_target_is_its_target(architecture: str):
    target = tiny_model(architecture)
    assert torch.equal(logits_of(narrowed(target, width_of(target))), logits_of(target))


@pytest.mark.parametrize("architecture", LLAMA_LIKE)
def test_channels_that_carry_nothing_are_the_ones_to_go_and_nothing_changes(architecture: str):
    """The norms divide by the root mean square of fewer channels: scale has to make up for it."""
    hf = tiny_hf(architecture)
    silent = [3, 4, 17, 30, 31, 8, 9, 10]
    with torch.no_grad():
        hf.get_input_embeddings().weight[:, silent] = 0
        for out in (*attentions_of(hf), *mlps_of(hf)):
            out.weight[silent] = 0
    target = wrap_model(hf)
    draft = narrowed(target, width_of(target)._replace(hidden=24))
    assert draft.hf.config.hidden_size == 24
    torch.testing.assert_close(logits_of(draft), logits_of(target), rtol=1e-3, atol=1e-4)


def test_inner_channels_that_carry_nothing_go_and_the_others_grow():
    hf = tiny_hf("llama")
    with torch.no_grad():
        for index, out in enumerate(mlps_of(hf)):
            out.weight[:, index : index + 16] = 0
    target = wrap_model(hf)
    draft = narrowed(target, width_of(target)._replace(inner=32))
    with torch.no_grad():
        for out in mlps_of(hf):
            out.weight *= math.sqrt(48 / 32)
    torch.testing.assert_close(logits_of(draft), logits_of(target), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("silent", "num_key_heads"),
    [
        ([0, 3], 2),  # one head of each pair
        ([0, 1], 1),  # both heads of the first pair, and their keys with them
    ],
)
def test_heads_that_carry_nothing_go_with_their_keys(silent: list[int], num_key_heads: int):
    hf = tiny_hf("qwen3")
    with torch.no_grad():
        for out in attentions_of(hf):
            for head in silent:
                out.weight[:, 8 * head : 8 * head + 8] = 0
    target = wrap_model(hf)
    width = width_of(target)._replace(num_heads=2, num_key_heads=num_key_heads)
    draft = narrowed(target, width)
    layers: Any = draft.hf.base_model.layers
    assert layers[0].self_attn.k_proj.out_features == 8 * num_key_heads
    with torch.no_grad():
        for out in attentions_of(hf):
            out.weight *= math.sqrt(2)
    torch.testing.assert_close(logits_of(draft), logits_of(target), rtol=1e-4, atol=1e-5)


def test_importance_is_what_parts_add_to_the_stream():
    """Layer 0 by hand, from its own inputs; another road than hooks on the parts."""
    target = tiny_model("llama")
    got = measure_importance(target, [TEXT, [], TEXT[:4]])
    inputs: dict[str, list[Tensor]] = {"mlp": [], "attention": []}
    body: Any = target.hf.base_model
    layer = body.layers[0]
    layer.mlp.register_forward_hook(lambda _m, args, _o: inputs["mlp"].append(args[0][0]))
    layer.self_attn.o_proj.register_forward_hook(
        lambda _m, args, _o: inputs["attention"].append(args[0][0])
    )
    for text in (TEXT, TEXT[:4]):
        with torch.inference_mode():
            body(input_ids=torch.tensor([text]), use_cache=False)
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
    draft = narrowed(target, Width(16, 32, 2, 1))
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
        (Width(30, 48, 4, 2), "got 30 hidden channels, 4 heads and 2 key heads"),
        (Width(30, 48, 3, 2), "got 30 hidden channels, 3 heads and 2 key heads"),
        (Width(32, 48, 4, 1), "as in the target at most 2 heads per key head"),
        (Width(32, 48, 5, 2), "num_heads of the draft is 5; wanted 1 to the target's 4"),
    ],
)
def test_widths_that_cannot_be_are_refused(width: Width, message: str):
    importance = Importance(torch.ones(32), torch.ones(4, 48), torch.ones(4, 4))
    with pytest.raises(UsageError, match=message):
        subclone(tiny_model("llama"), width, importance)


def test_sizes_that_are_not_given_are_those_of_the_model():
    assert width_with(tiny_model("llama"), (16, None, 2, None)) == Width(16, 48, 2, 2)


def test_other_architectures_and_no_text_are_refused():
    for name in ("gpt2", "t5"):
        with pytest.raises(UnsupportedModelError, match=f"{name} is not Llama-like, so it cannot"):
            measure_importance(tiny_model(name), [TEXT])
    with pytest.raises(UsageError, match="got no text to rank"):
        measure_importance(tiny_model("llama"), [[]])
