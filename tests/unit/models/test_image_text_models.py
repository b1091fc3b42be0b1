"""Models of images and text: their text is that of generate() of the whole model.

Their classes are not those of causal language models in transformers. Weights that text does not
read are neither counted nor drafted.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
    PreTrainedModel,
)

from paceline.core.sampling import SamplingParams
from paceline.decode import SpeculativeDecoder
from paceline.errors import UnsupportedModelError
from paceline.models import HfModel, load, load_model, wrap_model
from paceline.models.drafts.layers import subset_layers
from paceline.models.drafts.save import save_draft
from paceline.models.drafts.scratch import derive_draft
from paceline.models.hf.base import recorded_hidden_states
from paceline.models.inspection import inspect_model
from paceline.train.initial_draft import DraftConfig, make_draft
from support.checkpoints import edit
from support.models import LLAMA_LIKE, generated, tiny_tokenizer

PROMPTS = [[5, 6, 7, 9], [11, 4], [8, 5, 9, 30, 21, 7]]
_TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
_TOWER |= {"num_attention_heads": 4, "image_size": 28, "patch_size": 14}
_GEMMA = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
_GEMMA |= {"query_pre_attn_scalar": 8, "tie_word_embeddings": True}
_GEMMA |= {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 266}  # of Gemma 4
_GEMMA |= {"num_kv_shared_layers": 0, "global_head_dim": 8, "enable_moe_block": False}
_SECTIONS = {"qwen2_5_vl": [1, 1, 2], "qwen3_vl": [2, 1, 1]}
DRAFTS = {"mistral3": "mistral", "llava": "llama", "internvl": "qwen2", "smolvlm": "llama"}
"""The type of the language model alone, by that of the whole model."""
KINDS = [*DRAFTS, *_SECTIONS]
_OTHERS = ("vision", "audio", "multi_modal")  # in the names that transformers gives


def saved(kind: str, folder: Path) -> PreTrainedModel:
    """A tiny random model with its tokenizer."""
    default: Any = AutoConfig.for_model(kind)
    text = {**LLAMA_LIKE, "vocab_size": 266, "eos_token_id": 1, "pad_token_id": 0}
    tower: dict[str, Any] = {**_TOWER}
    if kind in _SECTIONS:
        rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": _SECTIONS[kind]}
        text["rope_parameters"] = rope
        tower |= {"num_heads": 4, "depth": 2, "embed_dim": 32, "out_hidden_size": 32}
        tower |= {"fullatt_block_indexes": [1], "deepstack_visual_indexes": [0]}
    if kind.startswith("gemma"):
        text |= _GEMMA
    types = [default.get_text_config(decoder=True).model_type]
    types += [getattr(default.vision_config, "model_type", f"{kind}_vision")]
    config: Any = AutoConfig.for_model(
        kind,
        text_config=text | {"model_type": types[0]},
        vision_config=tower | {"model_type": types[1]},
        mm_tokens_per_image=4,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        hf = AutoModelForImageTextToText.from_config(config).float().eval()
    hf.generation_config = GenerationConfig(eos_token_id=1, pad_token_id=0)
    hf.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return hf


@pytest.mark.parametrize("kind", KINDS)
def test_texts_are_those_of_generate_of_the_whole_model(kind: str, tmp_path: Path):
    hf = saved(kind, tmp_path)
    model = load(tmp_path, "float32")
    decoder = SpeculativeDecoder(model, model, gamma=3, sampling=SamplingParams(temperature=0))
    texts = [text.tokens for text in decoder.generate(PROMPTS, 12, seed=1)]
    assert texts == [generated(hf, prompt, 12) for prompt in PROMPTS]
    assert model.num_parameters < hf.num_parameters(), "the tower reads no text"


def test_attention_of_the_hub_is_not_used_by_the_part_that_reads_text_either(tmp_path: Path):
    saved("llava", tmp_path)
    edit(tmp_path / "config.json", attn_implementation={"text_config": "flash_attention_2"})
    with pytest.warns(UserWarning, match="asks for attn_implementation 'flash_attention_2'"):
        model = load(tmp_path, "float32")
    assert model.hf.config.get_text_config()._attn_implementation == "sdpa"


@pytest.mark.filterwarnings("ignore:.*than tokenizer.json")  # the tests' one is not Qwen's
@pytest.mark.parametrize("kind", DRAFTS)
def test_drafts_are_language_models_alone(kind: str, tmp_path: Path):
    hf = saved(kind, tmp_path / "target")
    target = load_model(tmp_path / "target", "float32")
    every = DraftConfig(target="t", out=tmp_path / "draft", layers=range(4))
    draft = make_draft(every, target)
    save_draft(draft, tmp_path / "target", tmp_path / "draft")
    again = load_model(tmp_path / "draft", "float32")
    assert again.hf.config.model_type == DRAFTS[kind]
    for prompt in PROMPTS:
        assert generated(again.hf, prompt, 12) == generated(hf, prompt, 12)


@pytest.mark.parametrize("kind", _SECTIONS)
def test_what_has_no_language_model_alone_gives_no_draft(kind: str, tmp_path: Path):
    saved(kind, tmp_path)
    target = load_model(tmp_path, "float32")
    with pytest.raises(UnsupportedModelError, match="name a draft that has its tokenizer"):
        make_draft(DraftConfig(target="t", out=tmp_path / "draft", layers=[0, 3]), target)


def logits_of(hf: Any) -> torch.Tensor:
    with torch.inference_mode():
        return hf(input_ids=torch.tensor([PROMPTS[2] + PROMPTS[0]]), use_cache=False).logits[0]


@pytest.mark.parametrize("kind", ["gemma3", "gemma4"])
def test_a_draft_of_all_layers_is_the_text_part_alone(kind: str, tmp_path: Path):
    hf = saved(kind, tmp_path / "target")
    read = sum(
        weight.numel()
        for name, weight in hf.named_parameters()
        if not any(other in name for other in _OTHERS)
    )
    assert read < hf.num_parameters()
    target = wrap_model(hf, tiny_tokenizer())
    assert target.num_parameters == read
    assert inspect_model(tmp_path / "target").num_parameters == read
    every = DraftConfig(target="t", out=tmp_path / "draft", layers=[0, 1, 2, 3])
    draft = make_draft(every, target)
    assert draft.num_parameters == draft.hf.num_parameters() == read
    torch.testing.assert_close(logits_of(draft.hf), logits_of(hf))
    if kind == "gemma4":  # its embeddings have a part for each layer
        with pytest.raises(UnsupportedModelError, match="these layers do not match"):
            make_draft(every.model_copy(update={"layers": [0, 3]}), target)
        return
    half = make_draft(every.model_copy(update={"layers": [0, 3]}), target)
    assert target.hf.config.get_text_config().num_hidden_layers == 4
    save_draft(half, tmp_path / "target", tmp_path / "draft")
    again = load_model(tmp_path / "draft", "float32")
    assert again.hf.config.model_type == "gemma3_text"
    torch.testing.assert_close(logits_of(again.hf), logits_of(half.hf))


def gemma4(**settings: Any) -> HfModel:
    """Heads of layers with full attention are larger."""
    sizes = {**LLAMA_LIKE, **_GEMMA, "vocab_size": 266, "hidden_size_per_layer_input": 0}
    config = AutoConfig.for_model("gemma4_text", **sizes | {"global_head_dim": 16} | settings)
    return wrap_model(AutoModelForCausalLM.from_config(config).float().eval(), tiny_tokenizer())


@pytest.mark.parametrize("layers", [(0, 1, 3), (1, 2, 3), (2, 3)])
def test_layers_of_gemma_4_keep_their_sizes(layers: tuple[int, ...], tmp_path: Path):
    target = gemma4(num_global_key_value_heads=1, attention_k_eq_v=True)
    draft = subset_layers(target, layers)
    draft.hf.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(logits_of(again), logits_of(draft.hf))
    with pytest.raises(UnsupportedModelError, match="differ by layer, so it gets no narrower copy"):
        derive_draft(target, 0.5)
    with pytest.raises(UnsupportedModelError, match="these layers do not match"):
        subset_layers(target, [0, 1, 2])  # a configuration that is read ends with full attention


def test_a_listener_hears_each_token_of_a_prompt_and_no_layer_is_left_out_whose_keys_another_uses():
    target = gemma4(num_kv_shared_layers=2, hidden_size_per_layer_input=8)
    with recorded_hidden_states(target) as recorded:
        target.start_session().prefill([PROMPTS[0], PROMPTS[2]])
    assert [states.shape[1] for states in recorded] == [6]
    with pytest.raises(UnsupportedModelError, match="these layers do not match"):
        subset_layers(target, [0, 3])
