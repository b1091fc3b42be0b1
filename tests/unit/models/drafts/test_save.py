"""What a saved model says is what transformers 4, and engines of its time, read."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.models.auto.modeling_auto import AutoModelForImageTextToText

from paceline.models import load_model
from paceline.models.drafts.layers import subset_layers
from paceline.models.drafts.save import add_old_keys, save_draft
from paceline.models.drafts.scratch import NewModel, NewTokenizer, write_new_model
from support.checkpoints import edit
from support.models import LLAMA_LIKE, tiny_hf, tiny_tokenizer

LLAMA_3: dict[str, Any] = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_type": "llama3",
}
_FACTORS = {"short_factor": [1.1] * 3, "long_factor": [2.0, 3.0, 4.0]}
LAYERS = ["sliding_attention", "full_attention"] * 2
# as the files of these models have them, from before transformers 5
OLD: dict[str, dict[str, Any]] = {
    "llama": {"rope_theta": 5e5, "rope_scaling": LLAMA_3},
    "qwen2": {"rope_theta": 1e6, "rope_scaling": None},
    "gemma3_text": {
        "rope_theta": 1e6,
        "rope_local_base_freq": 300.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "layer_types": LAYERS,
    },
    "olmo3": {"rope_theta": 5e5, "rope_scaling": None, "layer_types": LAYERS},
    "phi3": {
        "rope_theta": 2e4,
        "rope_scaling": {"type": "longrope", **_FACTORS},
        "partial_rotary_factor": 0.75,
        "original_max_position_embeddings": 32,
    },
    "stablelm": {"rope_theta": 2e4, "rope_scaling": None, "partial_rotary_factor": 0.5},
    "gpt_neox": {"rotary_emb_base": 700, "rotary_pct": 0.5, "rope_scaling": None},
    "qwen3_moe": {"rope_theta": 1e6, "num_experts": 4, "num_experts_per_tok": 2},
}


def _settings(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def _saved(folder: Path, target: Any) -> dict[str, Any]:
    save_draft(target, folder, folder / "draft")
    return _settings(folder / "draft")


@pytest.mark.parametrize("kind", OLD)
def test_keys_of_transformers_4_are_written_as_they_were_read(kind: str, tmp_path: Path):
    path = tmp_path / "config.json"
    old = {"model_type": kind, "torch_dtype": "float32", **OLD[kind]}
    sizes = {"vocab_size": 266, "eos_token_id": 1, "pad_token_id": 2, "moe_intermediate_size": 16}
    edit(path, **LLAMA_LIKE, **sizes, **old)
    written = path.read_text()
    config = AutoConfig.from_pretrained(tmp_path)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    path.write_text(written)
    tiny_tokenizer(composes=kind == "qwen2").save_pretrained(tmp_path)
    found = _saved(tmp_path, load_model(tmp_path, "float32"))
    assert {key: found[key] for key in old} == old
    assert found["dtype"] == "float32"
    # and transformers 5 reads what it read
    again = AutoConfig.from_pretrained(tmp_path / "draft")
    assert again.rope_parameters == AutoConfig.from_pretrained(tmp_path).rope_parameters


def test_keys_of_the_text_part_are_written_there(tmp_path: Path):
    tower = {**LLAMA_LIKE, "image_size": 28, "patch_size": 14, "num_key_value_heads": 4}
    text = {**LLAMA_LIKE, "vocab_size": 266, "model_type": "llama"}
    text |= {"rope_theta": 5e5, "rope_scaling": {**LLAMA_3}}
    parts = {"text_config": text, "vision_config": tower | {"model_type": "clip_vision_model"}}
    hf = AutoModelForImageTextToText.from_config(AutoConfig.for_model("llava", **parts)).float()
    hf.generation_config = GenerationConfig(eos_token_id=1, pad_token_id=0)
    hf.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    found = _saved(tmp_path, load_model(tmp_path, "float32"))["text_config"]
    assert (found["rope_theta"], found["rope_scaling"]) == (5e5, LLAMA_3)


def test_rotations_that_transformers_4_has_no_names_for_get_none(tmp_path: Path):
    """It does not know the model, and transformers 5 would read the old keys first."""
    config = AutoConfig.for_model("laguna", **LLAMA_LIKE)
    settings = json.loads(config.to_json_string())
    add_old_keys(config, settings)
    assert not {"rope_theta", "rope_scaling", "rope_local_base_freq"} & settings.keys()
    edit(tmp_path / "config.json", **settings)
    assert AutoConfig.from_pretrained(tmp_path).rope_parameters == config.rope_parameters


@pytest.mark.parametrize("equal", [False, True], ids=["another head", "the embedding as head"])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "t5", "bart", "sharded"])
def test_a_head_that_is_stored_is_said_to_be_stored(kind: str, equal: bool, tmp_path: Path):
    architecture = "llama" if kind == "sharded" else kind
    hf: Any = tiny_hf(architecture, vocab_size=266)
    hf.config.tie_word_embeddings = True
    hf.tie_weights()
    hf.save_pretrained(tmp_path, max_shard_size="20KB" if kind == "sharded" else "1GB")
    tiny_tokenizer().save_pretrained(tmp_path)
    name = "lm_head.weight"
    embedding_VD = hf.get_input_embeddings().weight.detach()
    head_VD = embedding_VD.clone() if equal else torch.randn(embedding_VD.shape)
    (file, *_) = tmp_path.glob("*.safetensors")
    save_file(load_file(file) | {name: head_VD}, file, {"format": "pt"})
    if (index := tmp_path / "model.safetensors.index.json").exists():
        known = json.loads(index.read_text())
        edit(index, weight_map=known["weight_map"] | {name: file.name})
    target = load_model(tmp_path, "float32")
    part = subset_layers(target, [0, 1])
    found = _saved(tmp_path, part)
    with safe_open(tmp_path / "draft" / "model.safetensors", "pt") as stored:
        assert (name in stored.keys()) is not equal  # noqa: SIM118
    # transformers needs the key to share the embeddings of BART's encoder and decoder
    assert found["tie_word_embeddings"] is (equal or kind == "bart")
    again = load_model(tmp_path / "draft", "float32")
    head: Any = again.hf.get_output_embeddings()
    assert torch.equal(head.weight, head_VD)


def test_a_new_tokenizer_has_a_class_that_transformers_4_knows(tmp_path: Path):
    shape = NewModel(hidden_size=32, num_layers=2, num_heads=4, max_length=64)
    text = "the cat sat on the mat 123"
    write_new_model(shape, NewTokenizer(vocab_size=270), [text], tmp_path / "new", seed=0)
    said = json.loads((tmp_path / "new" / "tokenizer_config.json").read_text())
    assert said["tokenizer_class"] == "PreTrainedTokenizerFast"
    plain = Tokenizer.from_file(str(tmp_path / "new" / "tokenizer.json"))
    tokenizer: Any = load_model(tmp_path / "new", "float32").tokenizer
    assert tokenizer(text)["input_ids"] == plain.encode(text).ids
