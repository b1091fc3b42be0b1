import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import Gemma3TextConfig, LlamaConfig, Qwen2Config, Qwen3Config

from paceline.errors import UnsupportedModelError, UsageError
from paceline.models.drafts.layers import subset_layers
from paceline.models.drafts.save import save_draft
from paceline.models.drafts.scratch import _narrowed, _widths, derive_draft
from support.models import tiny_model, tiny_tokenizer

LLAMA_LIKE = ["llama", "mistral", "qwen2", "qwen3", "gemma3_text"]


@pytest.mark.parametrize("architecture", LLAMA_LIKE)
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


def test_an_eighth_of_the_layers_unless_something_else_is_said():
    # round(4 / 8) is 0, and a draft has a layer
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


REAL = {
    "llama-3.1-8b": LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
    ),
    "qwen3-0.6b": Qwen3Config(
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
    ),
    "qwen2.5-7b": Qwen2Config(
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
    ),
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
