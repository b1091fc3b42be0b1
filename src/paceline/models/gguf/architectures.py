"""The configuration of a GGUF file: its architecture and its rotary positions."""

# R frequencies of a head
from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import AutoConfig

from paceline.models.hf.architectures import GGUF_CONTEXT

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from transformers import PreTrainedConfig

    from paceline.models.gguf.fields import GgufFile

_SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
_EXPERTS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
_QKV_BIASES = (".attn_q.bias", ".attn_k.bias", ".attn_v.bias")
_BIASES = {
    "attention_bias": (*_QKV_BIASES, ".attn_output.bias"),
    "mlp_bias": (".ffn_gate.bias", ".ffn_up.bias", ".ffn_down.bias"),
}
PAIRS = ("llama", "granite")  # rotate neighbours; transformers rotates the halves of a head
ROPE_FACTORS = "rope_freqs.weight"
_LONG = "rope_factors_long.weight"
_TOLERANCE = 1e-5  # of a factor; the file stores float32


@dataclass(frozen=True)
class Architecture:
    """How to read one architecture of llama.cpp, and how to write it.

    Attributes:
        model_type: Of transformers.
        keys: Required keys of the file and the settings that they are.
        fixed: Settings that llama.cpp's implementation implies.
        flags: Settings that are true if a block has one of these tensors.
        more: Further settings from the file; may replace others.
        written: Values of `model_type` that are written to files, too.
    """

    model_type: str
    keys: Mapping[str, str] = field(default_factory=lambda: _SIZES)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    flags: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    more: Callable[[GgufFile], dict[str, Any]] = lambda _file: {}
    written: tuple[str, ...] = ()

    @property
    def biases(self) -> tuple[str, ...]:
        """The biases that llama.cpp reads."""
        return tuple(itertools.chain(*self.flags.values())) or _QKV_BIASES


def read_config(file: GgufFile) -> PreTrainedConfig:
    """The configuration, without the settings of special tokens."""
    known = ARCHITECTURES.get(file.arch)
    if known is None:
        raise file.error(
            f"has the architecture {file.arch!r}, which is none of those read here "
            f"({', '.join(ARCHITECTURES)})"
        )
    settings: dict[str, Any] = {name: file.required(key) for key, name in known.keys.items()}
    settings["vocab_size"] = int(file.tensors["token_embd.weight"].shape[1])
    settings["tie_word_embeddings"] = "output.weight" not in file.tensors
    heads, width = int(file.required("attention.head_count")), _head_width(file)
    settings["num_key_value_heads"] = int(file.own("attention.head_count_kv", heads))
    settings["rope_parameters"] = _rope_parameters(file, width)
    flags = {name: _has(file, *tensors) for name, tensors in known.flags.items()}
    settings |= {**known.fixed, **flags, **known.more(file)}
    if settings["rope_parameters"].get("factor"):
        settings[GGUF_CONTEXT] = settings["max_position_embeddings"]
    config = AutoConfig.for_model(known.model_type, **settings)
    usual = int(file.required("embedding_length")) // heads
    if (getattr(config, "head_dim", None) or usual) != width:
        config.head_dim = width
    return config


def _head_width(file: GgufFile) -> int:
    usual = int(file.required("embedding_length")) // int(file.required("attention.head_count"))
    widths = [int(file.own(f"attention.{part}_length", usual)) for part in ("key", "value")]
    if widths[0] != widths[1]:
        raise file.error(f"has keys of {widths[0]} and values of {widths[1]} per head")
    return widths[0]


def _has(file: GgufFile, *parts: str) -> bool:
    """True if a block has one of these tensors."""
    return any(name.startswith("blk.") and name.endswith(parts) for name in file.tensors)


def _granite(file: GgufFile) -> dict[str, Any]:
    width = _head_width(file)
    return {
        "attention_multiplier": file.own("attention.scale", 0.0) or width**-0.5,
        "embedding_multiplier": file.own("embedding_scale", 0.0) or 1.0,
        "residual_multiplier": file.own("residual_scale", 0.0) or 1.0,
        "logits_scaling": file.own("logit_scale", 0.0) or 1.0,
    }


def _query_scale(file: GgufFile, *, large: int) -> float:
    """query_pre_attn_scalar; llama.cpp knows the largest model by its number of layers."""
    if file.required("block_count") == large:
        return file.required("embedding_length") / file.required("attention.head_count")
    return _head_width(file)


def _windows(file: GgufFile, period: int) -> list[str]:
    """`layer_types`: the last of `period` layers reads the whole text."""
    count = int(file.required("block_count"))
    given = file.own("attention.sliding_window_pattern", period)
    if not isinstance(given, list):
        given = [given == 0 or index % given < given - 1 for index in range(count)]
    return ["sliding_attention" if each else "full_attention" for each in given]


def _gemma2(file: GgufFile) -> dict[str, Any]:
    return {
        "attn_logit_softcapping": file.own("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": file.own("final_logit_softcapping", 30.0),
        "sliding_window": file.own("attention.sliding_window", 4096),
        "layer_types": _windows(file, 2),
        "query_pre_attn_scalar": _query_scale(file, large=46),
    }


def _gemma3(file: GgufFile) -> dict[str, Any]:
    window, count = int(file.own("attention.sliding_window", 0)), int(file.required("block_count"))
    full = _rope_parameters(file, _head_width(file))
    base = float(file.own("rope.freq_base_swa", 10_000.0))
    swa = {"rope_type": "default", "rope_theta": base}
    return {
        "final_logit_softcapping": file.own("final_logit_softcapping", 0.0) or None,
        "sliding_window": window or 4096,
        "layer_types": _windows(file, 6) if window else ["full_attention"] * count,
        "query_pre_attn_scalar": _query_scale(file, large=62),
        "rope_parameters": {"full_attention": full, "sliding_attention": swa},
    }


def _phi3(file: GgufFile) -> dict[str, Any]:
    context = int(file.required("context_length"))
    original = file.own("rope.scaling.original_context_length", context)
    window = int(file.own("attention.sliding_window", 0))
    return {
        "original_max_position_embeddings": original,
        "sliding_window": window if 0 < window < context else None,
        "pad_token_id": None,
    }


def _rope_parameters(file: GgufFile, width: int) -> dict[str, Any]:
    """The settings for heads of `width` values; raises ModelLoadError without any."""
    theta = float(file.own("rope.freq_base", 10_000.0))
    basic: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    kind = file.own("rope.scaling.type", "linear")
    if kind not in ("none", "linear", "yarn") or _LONG in file.tensors:
        kind = "longrope" if _LONG in file.tensors else kind
        raise file.error(f"has rope.scaling.type = {kind}, which is not supported")
    if (rotated := file.own("rope.dimension_count", width)) != width:
        raise file.error(f"has rope.dimension_count = {rotated} for heads of {width} values")
    older = float(file.own("rope.scale_linear", 0.0))
    factor = float(file.own("rope.scaling.factor", older)) or 1.0
    factor = 1.0 if kind == "none" else factor
    if kind == "yarn":
        return basic | _yarn(file, factor)
    if ROPE_FACTORS in file.tensors:
        if factor != 1.0:
            raise file.error(f"has both {ROPE_FACTORS} and rope.scaling.factor = {factor:g}")
        return basic | _llama3(file, theta, width)
    return basic if factor == 1.0 else basic | {"rope_type": "linear", "factor": factor}


def _yarn(file: GgufFile, factor: float) -> dict[str, Any]:
    usual = 1.0 + 0.1 * math.log(factor) if factor > 1.0 else 1.0
    # transformers' attention_factor: the whole factor; converters store it, llama.cpp mostly
    # ignores it
    stored = float(file.own("rope.scaling.yarn_attn_factor", usual))
    if not math.isclose(stored, usual, rel_tol=1e-5):
        raise file.error(f"has rope.scaling.yarn_attn_factor = {stored:g}, which is not supported")
    original = file.own("rope.scaling.original_context_length", file.required("context_length"))
    found = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    attention = float(file.own("rope.scaling.attn_factor", 1.0))
    return found if attention == 1.0 else found | {"attention_factor": usual * attention}


def _llama3(file: GgufFile, theta: float, width: int) -> dict[str, Any]:
    """The parameters of Llama 3 that give these factors of frequencies.

    With t turns per position, a factor is F where t < 1 / original, 1 where t > 4 / original, and
    between them 1 / factor = (1 - s) / F + s, s = (original t - 1) / 3.
    """
    factors_R = torch.from_numpy(file.tensors[ROPE_FACTORS].data.astype("float64").reshape(-1))
    if bool((factors_R == 1.0).all()):
        return {}
    turns_R = theta ** -(torch.arange(0, width, 2, dtype=torch.float64) / width) / (2 * math.pi)
    factor = float(factors_R.max())
    for original in (2**power for power in range(4, 24)):
        share_R = ((original * turns_R - 1) / 3).clamp(0, 1)
        if _equal(1 / ((1 - share_R) / factor + share_R), factors_R):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": original,
            }
    raise file.error(f"has factors in {ROPE_FACTORS} that are not Llama 3's")


def _equal(wanted_R: Tensor, found_R: Tensor) -> bool:
    same = wanted_R.shape == found_R.shape
    return same and torch.allclose(wanted_R, found_R, rtol=_TOLERANCE, atol=0)


_GELU = {"hidden_activation": "gelu_pytorch_tanh", "hidden_act": "gelu_pytorch_tanh"}
_NO_WINDOW = {"use_sliding_window": False}
_QKV = {"attention_bias": _QKV_BIASES}
ARCHITECTURES = {
    "llama": Architecture("llama", flags=_BIASES, written=("llama", "mistral")),
    "qwen2": Architecture("qwen2", fixed=_NO_WINDOW, written=("qwen2",)),
    "qwen3": Architecture("qwen3", fixed=_NO_WINDOW, flags=_QKV, written=("qwen3",)),
    "qwen3moe": Architecture(
        "qwen3_moe", _SIZES | _EXPERTS, fixed=_NO_WINDOW | {"norm_topk_prob": True}, flags=_QKV
    ),
    "gemma2": Architecture("gemma2", fixed=_GELU, more=_gemma2),
    "gemma3": Architecture("gemma3_text", fixed=_GELU, more=_gemma3),
    "phi3": Architecture("phi3", more=_phi3),
    "granite": Architecture("granite", flags=_BIASES, more=_granite),
}
"""The families that are read, by llama.cpp's name; those with `written` are also written."""
