"""A draft of some of the target's layers: what it computes, what is saved, what is refused.

What a saved model says is what transformers 4, and engines of its time, read.
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    Glm4MoeConfig,
    GPTNeoConfig,
    Qwen3MoeConfig,
)
from transformers.models.auto.modeling_auto import AutoModelForImageTextToText

from paceline.errors import ModelLoadError, UnsupportedModelError, UsageError
from paceline.models import CausalModel, load_model, wrap_model
from paceline.models.drafts.layers import layer_lists, subset_layers
from paceline.models.drafts.save import add_old_keys, save_draft
from paceline.models.drafts.scratch import NewModel, NewTokenizer, write_new_model
from paceline.models.inspection import inspect_model
from support.checkpoints import edit
from support.models import CONFIGS, LLAMA_LIKE, tiny_hf, tiny_model, tiny_tokenizer

TEXT = [5, 9, 3, 7, 11, 20, 30, 4, 8]


def logits_of(hf: nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        return hf(input_ids=torch.tensor([TEXT]), use_cache=False).logits


def skip_others(layers: Any, kept: list[int]) -> None:
    """Let all layers but these pass their input on."""
    for index, layer in enumerate(layers):
        if index not in kept:
            layer.register_forward_hook(
                lambda _module, args, output: (
                    (args[0], *output[1:]) if isinstance(output, tuple) else args[0]
                )
            )


def skip_layers(hf: nn.Module, kept: list[int]) -> torch.Tensor:
    """The target's own logits without the other layers: the draft by another road."""
    (layers,) = [m for m in hf.modules() if isinstance(m, nn.ModuleList) and len(m) == 4]
    skip_others(layers, kept)
    return logits_of(hf)


@pytest.mark.parametrize("architecture", CONFIGS)
@pytest.mark.parametrize("kept", [[0, 3], [2]])
def test_a_draft_computes_what_the_target_computes_without_the_other_layers(
    architecture: str, kept: list[int]
):
    draft = subset_layers(tiny_model(architecture), kept)
    wanted = skip_layers(tiny_hf(architecture), kept)
    torch.testing.assert_close(logits_of(draft.hf), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("architecture", CONFIGS)
def test_a_saved_draft_gives_the_same_logits_and_the_target_s_tokenizer_byte_for_byte(
    architecture: str, tmp_path: Path
):
    source, tokenizer = tmp_path / "target", tiny_tokenizer(composes=architecture == "qwen2")
    hf = tiny_hf(architecture, vocab_size=len(tokenizer))
    hf.save_pretrained(source)
    tokenizer.save_pretrained(source)
    (source / "chat_template.jinja").write_text("{{ messages }}")
    draft = subset_layers(wrap_model(hf, tokenizer), [0, 3])
    save_draft(draft, source, tmp_path / "draft")
    again = load_model(tmp_path / "draft", dtype="float32")
    assert torch.equal(logits_of(again.hf), logits_of(draft.hf))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / "draft" / name).read_bytes() == (source / name).read_bytes()
    config = json.loads((tmp_path / "draft" / "config.json").read_text())
    assert config["vocab_size"] == len(tokenizer)
    assert (tmp_path / "draft" / "generation_config.json").exists()
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "draft").iterdir()}
    assert modes == {(tmp_path / "draft" / "config.json").stat().st_mode & 0o777}


def test_a_draft_has_its_own_weights_and_leaves_the_target_alone():
    target = tiny_model("llama", tie_word_embeddings=True)
    before = logits_of(target.hf)
    draft = subset_layers(target, [1])
    with torch.no_grad():
        for weight in draft.hf.parameters():
            weight.add_(1.0)
    assert torch.equal(logits_of(target.hf), before)
    assert target.hf.config.num_hidden_layers == 4
    assert draft.head_weight is draft.hf.get_input_embeddings().weight
    assert draft.num_parameters < target.num_parameters


def test_a_draft_decodes():
    draft = subset_layers(tiny_model("gemma3_text"), [0, 1, 3])
    session = draft.start_session()
    session.prefill([TEXT, TEXT[:2]])
    session.rollback([0, 1])
    got = session.extend(torch.tensor([[6], [TEXT[1]]]))[1, 0]
    torch.testing.assert_close(got, draft.start_session().prefill([TEXT[:2]])[0])


@pytest.mark.parametrize("layers", [[], [0, 4], [-1, 2], [1, 1], [2, 0]])
def test_bad_indices_are_refused_with_the_range(layers: list[int]):
    with pytest.raises(UsageError, match="increasing numbers from 0 to 3"):
        subset_layers(tiny_model("llama"), layers)


def test_layers_in_two_lists_or_of_several_kinds_are_refused():
    hf = tiny_hf("llama")
    mlp = hf.model.layers[3].mlp
    hf.model.layers[3].mlp = nn.Linear(32, 32)
    with pytest.raises(UnsupportedModelError, match="llama has layers of several kinds"):
        subset_layers(CausalModel(hf), [0, 3])
    hf.model.layers[3].mlp = mlp
    hf.model.more_layers = nn.ModuleList(nn.Identity() for _ in range(4))
    with pytest.raises(UnsupportedModelError, match="4 layers in 2 lists"):
        subset_layers(wrap_model(hf), [0])


def test_weights_are_stored_in_the_asked_dtype_and_tokenizer_files_come_along(
    model_directory: Path, tmp_path: Path
):
    kept = ("source.spm", "target.spm", "target_vocab.json", "sentencepiece.bpe.model")
    for name in kept:  # of Marian and mBART
        (model_directory / name).write_bytes(name.encode())
    draft = subset_layers(load_model(model_directory, dtype="float32"), [0, 1])
    save_draft(draft, model_directory, tmp_path / "draft", dtype=torch.bfloat16)
    assert all((tmp_path / "draft" / name).read_bytes() == name.encode() for name in kept)
    assert draft.dtype == torch.float32
    assert json.loads((tmp_path / "draft" / "config.json").read_text())["dtype"] == "bfloat16"
    again = load_model(tmp_path / "draft", dtype="float32")
    assert torch.equal(again.head_weight, draft.head_weight.bfloat16().float())
    for name in ("tokenizer.json", "tokenizer_config.json", *kept):
        (model_directory / name).unlink()
    with pytest.raises(ModelLoadError, match="no tokenizer files to copy"):
        save_draft(draft, model_directory, tmp_path / "draft")


_EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
_NEO = {"hidden_size": 32, "num_layers": 4, "num_heads": 4, "window_size": 3}
_NEO |= {"max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 1}
NUMBERED: dict[str, Callable[..., Any]] = {  # by what their configs say of layers
    "how many come first that are of another kind": partial(
        Glm4MoeConfig, **LLAMA_LIKE, **_EXPERTS, n_routed_experts=4, first_k_dense_replace=2
    ),
    "a list of those without experts": partial(
        Qwen3MoeConfig, **LLAMA_LIKE, **_EXPERTS, num_experts=4, mlp_only_layers=[1]
    ),
    "a pattern of global and local ones": partial(
        GPTNeoConfig, **_NEO, attention_types=[[["global", "local"], 2]]
    ),
}


@pytest.mark.parametrize("kept", [[0, 3], [1, 2], [1, 3], [0, 2]])
@pytest.mark.parametrize("kind", NUMBERED)
def test_layers_that_a_config_describes_by_number_compute_the_same_on_disk(
    kind: str, kept: list[int], tmp_path: Path
):
    config = NUMBERED[kind](vocab_size=61, pad_token_id=2)
    target = CausalModel(AutoModelForCausalLM.from_config(config).eval())
    draft = subset_layers(target, kept)
    draft.hf.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    wanted = skip_layers(target.hf, kept)
    torch.testing.assert_close(logits_of(draft.hf), wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits_of(again), wanted, rtol=1e-5, atol=1e-5)


def pair_logits(hf: Any) -> torch.Tensor:
    with torch.inference_mode():
        text = {"input_ids": torch.tensor([TEXT]), "decoder_input_ids": torch.tensor([[2, 9, 4]])}
        return hf(**text, use_cache=False).logits


@pytest.mark.parametrize("architecture", ["bart", "mbart", "marian", "pegasus"])
def test_encoder_and_decoder_layers_are_chosen_apart(architecture: str):
    hf: Any = tiny_hf(architecture)
    draft = subset_layers(wrap_model(hf), [0, 2], [1])
    skip_others(hf.model.decoder.layers, [0, 2])
    skip_others(hf.model.encoder.layers, [1])
    torch.testing.assert_close(pair_logits(draft.hf), pair_logits(hf), rtol=1e-5, atol=1e-5)
    config: Any = draft.hf.config
    assert (config.decoder_layers, config.encoder_layers) == (2, 1)


@pytest.mark.parametrize("architecture", ["t5", "bart"])
def test_layers_of_a_saved_encoder_decoder_are_counted(architecture: str, tmp_path: Path):
    hf: Any = tiny_hf(architecture)
    hf.save_pretrained(tmp_path)
    facts = inspect_model(tmp_path)
    assert facts.num_layers == len(layer_lists(hf)["decoder"][1])
    assert facts.num_encoder_layers == len(layer_lists(hf)["encoder"][1])


@pytest.mark.parametrize("stated", ["generation_config.json", "config.json"])
def test_the_decoder_prompt_of_a_saved_model_is_that_of_the_loaded_one(stated: str, tmp_path: Path):
    """Old models force their first token in config.json and have no generation config."""
    tiny_hf("bart").save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    file = tmp_path / stated
    known = json.loads(file.read_text()) if file.exists() else {"decoder_start_token_id": 2}
    file.write_text(json.dumps(known | {"forced_bos_token_id": 17}))
    assert load_model(tmp_path).decoder_prompt == (2, 17)
    assert inspect_model(tmp_path).decoder_prompt == (2, 17)


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
