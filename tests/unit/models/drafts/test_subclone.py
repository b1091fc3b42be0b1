"""Narrower drafts: copies, exact where nothing that counts is lost, and new ones."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import Gemma3TextConfig, LlamaConfig, Qwen2Config, Qwen3Config

from paceline.errors import UnsupportedModelError, UsageError
from paceline.models import HfModel, load_model, prepare_for_decoding, wrap_model
from paceline.models.drafts.layers import subset_layers
from paceline.models.drafts.save import save_draft
from paceline.models.drafts.scratch import _narrowed, _widths, derive_draft
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


def test_a_width_whose_heads_engines_would_read_as_smaller_is_refused():
    """vLLM's Qwen2 takes hidden_size / num_heads for the size of a head: 8 here, not 6."""
    importance = Importance(torch.ones(32), torch.ones(4, 48), torch.ones(4, 4))
    target = tiny_model("qwen2")
    vars(target.hf.config).pop("head_dim")  # real ones have none
    with pytest.raises(UsageError, match=r"a qwen2's head, which is 8; got 24 / 4"):
        subclone(target, Width(24, 48, 4, 2), importance)
    subclone(target, Width(16, 48, 2, 2), importance)


def test_sizes_that_are_not_given_are_those_of_the_model():
    assert width_with(tiny_model("llama"), (16, None, 2, None)) == Width(16, 48, 2, 2)


def test_other_architectures_and_no_text_are_refused():
    for name in ("gpt2", "t5"):
        with pytest.raises(UnsupportedModelError, match=f"{name} is not Llama-like, so it cannot"):
            measure_importance(tiny_model(name), [TEXT])
    with pytest.raises(UsageError, match="got no text to rank"):
        measure_importance(tiny_model("llama"), [[]])


# new weights instead of copies


@pytest.mark.parametrize("architecture", [*LLAMA_LIKE, "mistral", "gemma3_text"])
def test_the_widest_draft_that_the_share_allows(architecture: str):
    target = tiny_model(architecture)
    draft = derive_draft(target, 0.5, num_layers=2)
    assert draft.num_parameters <= 0.5 * target.num_parameters
    width = draft.hf.config.hidden_size
    more = derive_draft(target, 0.99, num_layers=2)
    assert more.hf.config.hidden_size > width
    assert type(draft.hf) is type(target.hf)
    with torch.inference_mode():
        logits = draft.hf(input_ids=torch.tensor([[1, 2, 3]])).logits
    assert logits.isfinite().all()


def test_proportions_are_the_target_s():
    # 32 wide with 4 heads of 8, 2 key heads, 48 inside: at 16 it is 2, 1 and 24, to 16s: 16 or 32
    draft = derive_draft(tiny_model("llama"), 0.5, num_layers=2)
    config = draft.hf.config
    assert (config.hidden_size, config.num_attention_heads, config.head_dim) == (16, 2, 8)
    assert config.num_key_value_heads == 1
    assert config.intermediate_size in (16, 32)
    assert config.num_hidden_layers == 2
    # an eighth of the layers; round(4 / 8) is 0, and a draft has a layer
    assert derive_draft(tiny_model("llama"), 0.5).hf.config.num_hidden_layers == 1


def test_random_weights_are_those_of_the_seed():
    target = tiny_model("llama")
    first, again, other = (
        derive_draft(target, 0.5, seed=seed).hf.state_dict() for seed in (1, 1, 2)
    )
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])
    assert float(first["lm_head.weight"].std()) == pytest.approx(0.02, rel=0.2)


def test_what_cannot_be_is_refused():
    target = tiny_model("llama")
    with pytest.raises(UsageError, match=r"smallest draft of 1 layers .* has \d+\.\d% of"):
        derive_draft(target, 0.001)
    with pytest.raises(UsageError, match="got 5 layers; wanted 1 to the target's 4"):
        derive_draft(target, 0.5, num_layers=5)
    with pytest.raises(UnsupportedModelError, match="t5 is an encoder-decoder, which gets no"):
        derive_draft(tiny_model("t5"), 0.5)


def sized(kind: Any, hidden: int, inner: int, layers: int, *heads: int, **more: int) -> Any:
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
    count, keys = heads
    return kind(**sizes, num_attention_heads=count, num_key_value_heads=keys, **more)


REAL = {  # hidden and inner size, layers, heads and key heads
    "llama-3.1-8b": sized(LlamaConfig, 4096, 14336, 32, 32, 8),
    "qwen3-0.6b": sized(Qwen3Config, 1024, 3072, 28, 16, 8, head_dim=128),
    "qwen2.5-7b": sized(Qwen2Config, 3584, 18944, 28, 28, 4),
}


@pytest.mark.parametrize("name", REAL)
def test_every_width_has_the_target_s_heads_in_whole_groups(name: str):
    """Heads of 16 with one key head for 227 of them are nothing that anybody would serve."""
    old = REAL[name]
    for width in _widths(old):
        new = _narrowed(old, width, 4)
        heads, key_heads = new.num_attention_heads, new.num_key_value_heads
        assert heads * old.num_key_value_heads == key_heads * old.num_attention_heads
        assert getattr(new, "head_dim", None) == getattr(old, "head_dim", None)
        if getattr(old, "head_dim", None) is None:
            assert width / heads == old.hidden_size / old.num_attention_heads
        # the nearest to the target's proportions that there is
        assert abs(key_heads - old.num_key_value_heads * width / old.hidden_size) <= 1
    assert new.hidden_size == old.hidden_size
    assert new.num_attention_heads == old.num_attention_heads


def test_a_draft_of_a_model_with_windows_sees_the_whole_text_in_one_layer():
    kinds = (["sliding_attention"] * 5 + ["full_attention"]) * 4 + ["sliding_attention"] * 2
    old = Gemma3TextConfig(num_hidden_layers=26, layer_types=kinds)
    assert "full_attention" in _narrowed(old, 1152, 3).layer_types
    assert _narrowed(old, 1152, 13).layer_types == kinds[1::2]


def test_a_new_draft_of_a_quantized_target_is_not_quantized(tmp_path: Path):
    target = tiny_model("llama")
    target.hf.config.quantization_config = {"quant_method": "gptq", "bits": 4}
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    target.hf.config.save_pretrained(tmp_path / "target")
    save_file({}, tmp_path / "target" / "model.safetensors")
    save_draft(derive_draft(target, 0.5), tmp_path / "target", tmp_path / "draft")
    assert "quantization_config" not in json.loads((tmp_path / "draft/config.json").read_text())
    assert "quantization_config" in target.hf.config.to_dict()
    with pytest.raises(UnsupportedModelError, match=r"this llama is quantized, .* original"):
        subset_layers(target, [0])
