"""Each architecture of a GGUF file computes what the model computes from which it was made.

Layouts and keys are those of llama.cpp's converter.
"""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from paceline.models import load_model
from support.gguf_files import tiny_vocabulary

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
RMS = "attention__layer_norm_rms_epsilon"
EXPERTS = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 16}
WIDTHS = {"attention__key_length": 16, "attention__value_length": 16}
CAPS = {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    # architecture -> model_type, settings, keys
    "granite": (
        "granite",
        {"attention_multiplier": 0.3, "residual_multiplier": 0.7, "logits_scaling": 3.0},
        {RMS: 1e-6, "attention__scale": 0.3, "residual_scale": 0.7, "logit_scale": 3.0},
    ),
    "qwen3moe": (
        "qwen3_moe",
        MOE | {"norm_topk_prob": True, "head_dim": 16},
        {RMS: 1e-6, **EXPERTS, **WIDTHS},
    ),
    "gemma2": (
        "gemma2",
        {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8, **CAPS},
        {RMS: 1e-6, **WIDTHS, **CAPS, "attention__sliding_window": 8},
    ),
    "gemma3": (
        "gemma3_text",
        {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8},
        {RMS: 1e-6, **WIDTHS, "attention__sliding_window": 8, "rope__freq_base": 1e6},
    ),
    "phi3": ("phi3", {}, {RMS: 1e-5}),
}


def stored(name: str, weight: np.ndarray, arch: str) -> np.ndarray:
    """A weight as llama.cpp's converter stores it; 4 heads, 2 of keys and values."""
    if arch == "granite" and (".q_proj." in name or ".k_proj." in name):
        heads = 4 if ".q_proj." in name else 2
        halves = weight.reshape(heads, 2, -1, weight.shape[1])
        return halves.swapaxes(1, 2).reshape(weight.shape)
    if arch in ("gemma2", "gemma3") and name.endswith("norm.weight"):
        return weight + 1
    return weight


def write(path: Path, hf: Any, arch: str, keys: dict[str, Any]) -> Path:
    writer = gguf.GGUFWriter(path, arch)
    writer.add_file_type(0)
    sizes = {"context_length": 64, "embedding_length": 32, "block_count": 4}
    sizes |= {"feed_forward_length": 48, "attention__head_count": 4, "attention__head_count_kv": 2}
    for name, value in (sizes | keys).items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add(f"{arch}.{name.replace('__', '.')}", value)
    tiny_vocabulary(writer)
    archs = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(archs[arch], 4)
    for name, weight in hf.state_dict().items():
        if name == "lm_head.weight" and hf.config.tie_word_embeddings:
            continue
        array = stored(name, weight.numpy(), arch)
        if name.endswith("gate_up_proj"):
            for part, half in zip(("gate", "up"), np.split(array, 2, 1), strict=True):
                writer.add_tensor(
                    f"blk.{name.split('.')[2]}.ffn_{part}_exps.weight", np.ascontiguousarray(half)
                )
            continue
        label = names.get_name(name, (".weight", ".bias"))
        assert label is not None
        label += "" if label.endswith((".weight", ".bias")) else ".weight"
        writer.add_tensor(label, np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.filterwarnings("ignore:with sdpa attention")  # Gemma 2, up to transformers 5.20
@pytest.mark.parametrize("arch", CASES)
def test_a_file_computes_what_its_model_computes(
    arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    model_type, settings, keys = CASES[arch]
    roles = {"vocab_size": 266, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}
    config = AutoConfig.for_model(model_type, **SIZES | roles | settings)
    config.initializer_range = 0.3
    torch.manual_seed(0)
    eager = "eager" if getattr(config, "attn_logit_softcapping", None) else None
    hf: Any = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation=eager
    )
    for weight in hf.eval().parameters():
        if weight.ndim == 1:
            torch.nn.init.normal_(weight, mean=0.5, std=0.2)
    read = load_model(write(tmp_path / "a.gguf", hf, arch, keys), dtype="float32")
    tokens = torch.tensor([[number * 37 % 260 for number in range(40)]])
    with torch.inference_mode():
        wanted, found = hf(tokens).logits, read.hf(tokens).logits
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
