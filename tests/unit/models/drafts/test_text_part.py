"""Models of images and text: weights that text does not read are neither counted nor drafted."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3Config,
    Gemma4Config,
    GenerationConfig,
    PreTrainedModel,
)

from paceline.models import load_model, wrap_model
from paceline.models.drafts.save import save_draft
from paceline.models.inspection import inspect_model
from paceline.train.initial_draft import DraftConfig, make_draft
from support.models import LLAMA_LIKE, tiny_tokenizer

TEXT = [5, 6, 7, 9, 11, 4, 8, 5]
_TEXT_PART = {**LLAMA_LIKE, "vocab_size": 266, "sliding_window": 4, "eos_token_id": 1}
_TOWER = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 3}
_TOWER |= {"num_attention_heads": 2}
OTHERS = ("vision", "audio", "multi_modal")  # in the names that transformers gives


def gemma(kind: str) -> PreTrainedModel:
    """A tiny random model with a tower for images."""
    types = ["sliding_attention", "full_attention"] * 2
    text: dict[str, Any] = {**_TEXT_PART, "layer_types": types, "tie_word_embeddings": True}
    if kind == "gemma3":
        config: Any = Gemma3Config(
            text_config=text | {"query_pre_attn_scalar": 8},
            vision_config={**_TOWER, "image_size": 28, "patch_size": 14},
            mm_tokens_per_image=4,
            eos_token_id=[1],
        )
    else:
        few = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 266}
        more = {"num_kv_shared_layers": 0, "global_head_dim": 8, "enable_moe_block": False}
        config = Gemma4Config(text_config=text | few | more, vision_config=_TOWER, eos_token_id=1)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        hf = AutoModelForCausalLM.from_config(config)
    hf.generation_config = GenerationConfig(eos_token_id=1)
    return hf.float().eval()


def logits_of(hf: Any) -> torch.Tensor:
    with torch.inference_mode():
        return hf(input_ids=torch.tensor([TEXT]), use_cache=False).logits[0]


@pytest.mark.parametrize("kind", ["gemma3", "gemma4"])
def test_a_draft_of_all_layers_is_the_text_part_alone(kind: str, tmp_path: Path):
    hf, tokenizer = gemma(kind), tiny_tokenizer()
    read = sum(
        weight.numel()
        for name, weight in hf.named_parameters()
        if not any(other in name for other in OTHERS)
    )
    assert read < hf.num_parameters()
    target = wrap_model(hf, tokenizer)
    assert target.num_parameters == read
    hf.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    assert inspect_model(tmp_path / "target").num_parameters == read
    every = DraftConfig(target="t", out=tmp_path / "draft", layers=[0, 1, 2, 3])
    draft = make_draft(every, target)
    assert draft.num_parameters == draft.hf.num_parameters() == read
    torch.testing.assert_close(logits_of(draft.hf), logits_of(hf))
    if kind == "gemma4":  # its embeddings have a part for each layer
        return
    half = make_draft(every.model_copy(update={"layers": [0, 3]}), target)
    assert target.hf.config.get_text_config().num_hidden_layers == 4
    save_draft(half, tmp_path / "target", tmp_path / "draft")
    again = load_model(tmp_path / "draft", "float32")
    assert again.hf.config.model_type == "gemma3_text"
    torch.testing.assert_close(logits_of(again.hf), logits_of(half.hf))
