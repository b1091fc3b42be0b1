"""A draft of some of the target's layers: what it computes, what is saved, what is refused."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Glm4MoeConfig, GPTNeoConfig, Qwen3MoeConfig

from paceline.errors import ModelLoadError, UnsupportedModelError, UsageError
from paceline.models import CausalModel, load_model, wrap_model
from paceline.models.drafts.layers import layer_lists, subset_layers
from paceline.models.drafts.save import save_draft
from paceline.models.inspection import inspect_model
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


def test_layers_that_compute_by_their_number_are_refused():
    target = tiny_model("gpt2", scale_attn_by_inverse_layer_idx=True)
    with pytest.raises(UnsupportedModelError, match="layer 3 of this gpt2 computes with scaling="):
        subset_layers(target, [0, 3])
    draft = subset_layers(target, [0, 1])
    wanted = skip_layers(target.hf, [0, 1])
    torch.testing.assert_close(logits_of(draft.hf), wanted, rtol=1e-5, atol=1e-5)


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
