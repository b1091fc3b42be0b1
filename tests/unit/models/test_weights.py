"""Constants of older checkpoints are no weights; weights without a layer are an error. Counts."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    CodeGenConfig,
    GPTBigCodeConfig,
    GPTNeoConfig,
    LlamaConfig,
    PreTrainedModel,
)

from paceline.models import CausalModel, load_model
from paceline.models.inspection import inspect_model
from support.checkpoints import fails
from support.models import LLAMA_LIKE, tiny_hf

_GPT = {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
_GPT |= {"bos_token_id": 0, "eos_token_id": 1}
_NEO = {"vocab_size": 61, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "window_size": 4}
_NEO |= {"max_position_embeddings": 64, "attention_types": [[["global", "local"], 1]]}
_CAUSAL = torch.ones(1, 1, 64, 64, dtype=torch.bool).tril()


def extended(folder: Path, hf: PreTrainedModel, tensors: dict[str, torch.Tensor]) -> Path:
    """The model's directory, with more tensors in its file."""
    hf.save_pretrained(folder)
    file = folder / "model.safetensors"
    save_file(load_file(file) | tensors, file, metadata={"format": "pt"})
    return folder


def made(config: Any) -> PreTrainedModel:
    return AutoModelForCausalLM.from_config(config).eval()


OLD: dict[str, tuple[Any, dict[str, torch.Tensor]]] = {
    "GPT-2": (lambda: tiny_hf("gpt2"), {"h.0.attn.masked_bias": torch.tensor(-1e4)}),
    "GPT-Neo": (
        lambda: made(GPTNeoConfig(**_NEO, eos_token_id=1)),
        {
            "transformer.h.0.attn.attention.bias": _CAUSAL,
            "transformer.h.1.attn.attention.bias": _CAUSAL & ~_CAUSAL.tril(-4),  # of a local layer
        },
    ),
    "CodeGen": (
        lambda: made(CodeGenConfig(**_GPT, rotary_dim=4)),
        {"transformer.h.0.attn.causal_mask": _CAUSAL},
    ),
    "StarCoder": (
        lambda: made(GPTBigCodeConfig(**_GPT)),
        {"transformer.h.0.attn.bias": _CAUSAL[0, 0]},
    ),
    "Llama 2": (
        lambda: tiny_hf("llama"),
        {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)},
    ),
    "an FP8 cache": (
        lambda: tiny_hf("qwen2"),
        {
            "model.layers.0.self_attn.k_scale": torch.tensor(1.0),
            "model.layers.0.self_attn.v_proj.output_scale": torch.tensor([1.0]),
        },
    ),
}


@pytest.mark.parametrize("name", OLD)
def test_constants_of_older_checkpoints_are_no_reason_to_refuse(tmp_path: Path, name: str):
    make, tensors = OLD[name]
    hf = make()
    model = load_model(extended(tmp_path / "m", hf, tensors), dtype="float32")
    batch = model.trial_batch([5, 6, 7])
    with torch.inference_mode():
        options: dict[str, Any] = {"decoder_input_ids": batch.tokens_BT} if batch.source else {}
        given = batch.source.tokens_BT if batch.source else batch.tokens_BT
        wanted = hf(input_ids=given, **options).logits
        torch.testing.assert_close(model.plain_logits(batch), wanted)


@pytest.mark.parametrize(
    ("key", "shape"),
    [
        ("model.layers.0.self_attn.q_proj.bias", (32,)),
        ("model.layers.0.self_attn.q_proj.weight_scale", (1,)),
        ("model.layers.4.mlp.up_proj.weight", (48, 32)),
        ("vision_tower.layers.0.mlp.up_proj.weight", (48, 32)),
    ],
)
def test_weights_that_a_config_has_no_layer_for_are_an_error(
    tmp_path: Path, key: str, shape: tuple[int, ...]
):
    folder = extended(tmp_path / "m", tiny_hf("llama"), {key: torch.zeros(shape)})
    fails(folder, "1 weights are in the file but not in the model, for example", key)


def by_hand(vocab: int = 61, *, heads: int = 2) -> int:
    """Weights of `LLAMA_LIKE`: embedding and head, four layers, norms."""
    layer = 32 * 32 * 2 + 2 * 16 * 32 + 3 * 48 * 32 + 2 * 32
    return heads * vocab * 32 + 4 * layer + 32


def test_parameters_of_shards_in_a_snapshot_are_those_that_the_index_names(tmp_path: Path):
    """A file of an earlier save lies beside them; files of the hub's cache are links."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots/1"
    snapshot.mkdir(parents=True)
    tiny_hf("llama").save_pretrained(blobs, max_shard_size="40KB")
    assert len(list(blobs.glob("model-*.safetensors"))) > 1
    tiny_hf("llama").save_pretrained(tmp_path / "older")
    (tmp_path / "older" / "model.safetensors").rename(blobs / "model-00001-of-00009.safetensors")
    for number, file in enumerate(sorted(blobs.iterdir())):
        file.rename(blobs / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    assert inspect_model(snapshot).num_parameters == by_hand()
    assert load_model(snapshot).num_parameters == by_hand()


@pytest.mark.parametrize("own_head", [False, True])
def test_a_stored_head_counts_if_it_is_not_the_embedding(tmp_path: Path, *, own_head: bool):
    """As transformers, which ties two stored tensors only if they are equal.

    Facts without weights are those of the configuration.
    """
    hf: Any = made(LlamaConfig(vocab_size=61, **LLAMA_LIKE, tie_word_embeddings=True))
    head = torch.randn(61, 32) if own_head else hf.get_input_embeddings().weight.detach().clone()
    extended(tmp_path, hf, {"lm_head.weight": head})
    assert inspect_model(tmp_path).num_parameters == by_hand(heads=1)
    assert load_model(tmp_path).num_parameters == by_hand(heads=1 + own_head)


def test_parameters_of_a_bin_file_and_buffers_are_counted_right(tmp_path: Path):
    hf = tiny_hf("llama")
    hf.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    weights = hf.state_dict() | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    torch.save(weights, tmp_path / "pytorch_model.bin")
    counts = [read(tmp_path).num_parameters for read in (inspect_model, load_model)]
    assert counts == [by_hand()] * 2


@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16])
def test_weights_that_are_packed_in_4_bits_count_as_what_they_stand_for(
    monkeypatch: pytest.MonkeyPatch, storage: torch.dtype
):
    """bitsandbytes keeps two weights in a byte, whatever the type of the bytes."""
    packed: Any = type("Params4bit", (torch.nn.Parameter,), {})
    bitsandbytes: Any = ModuleType("bitsandbytes")
    bitsandbytes.nn = SimpleNamespace(Params4bit=packed)
    monkeypatch.setitem(sys.modules, "bitsandbytes", bitsandbytes)
    hf: Any = tiny_hf("llama")
    for layer in hf.model.modules():
        if isinstance(layer, torch.nn.Linear):
            count = layer.weight.numel() // (2 * storage.itemsize)
            layer.weight = packed(torch.zeros(count, 1, dtype=storage), requires_grad=False)
    hf.is_loaded_in_4bit = True
    assert CausalModel(hf).num_parameters == by_hand()
