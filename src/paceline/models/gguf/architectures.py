"""Architectures of GGUF files as configurations of transformers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from transformers import AutoConfig

from paceline.models.gguf.rope import rope_parameters

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
}
_RMS = {"attention.layer_norm_rms_epsilon": "rms_norm_eps"}
_NORM = "attention.layer_norm_epsilon"


@dataclass(frozen=True)
class Architecture:
    """How to read one architecture of llama.cpp.

    Attributes:
        model_type: Of transformers.
        keys: Required keys of the file and the settings that they are.
        fixed: Settings that llama.cpp's implementation implies.
        more: Further settings from the file; may replace others.
        grouped: Has `num_key_value_heads`.
        rotary: Rotary positions; with `partial`, of a part of each head.
        partial: See `rotary`.
    """

    model_type: str
    keys: Mapping[str, str] = field(default_factory=lambda: _SIZES | _RMS)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    more: Callable[[GgufFile], dict[str, Any]] = lambda _file: {}
    grouped: bool = True
    rotary: bool = True
    partial: bool = False


def read_config(file: GgufFile) -> PreTrainedConfig:
    """The configuration, without the settings of special tokens.

    Raises:
        ModelLoadError: The architecture or one of its settings is not supported.
    """
    known = _architecture(file)
    if int(file.required("block_count")) > len(file.tensors):
        raise file.error("has a block_count beyond its number of tensors")
    settings: dict[str, Any] = {name: file.required(key) for key, name in known.keys.items()}
    settings["vocab_size"] = int(file.tensors["token_embd.weight"].shape[1])
    settings["tie_word_embeddings"] = "output.weight" not in file.tensors
    heads, width = int(file.required("attention.head_count")), _head_width(file)
    kv_heads = int(file.own("attention.head_count_kv", heads))
    if known.grouped:
        settings["num_key_value_heads"] = kv_heads
    elif kv_heads != heads and known.model_type != "falcon":
        raise file.error(f"has {kv_heads} key-value heads for {heads} heads")
    if known.rotary:
        rotated = int(file.own("rope.dimension_count", width))
        settings["rope_parameters"] = rope_parameters(file, rotated)
        if known.partial:
            settings["rope_parameters"]["partial_rotary_factor"] = rotated / width
        elif rotated != width:
            raise file.error(f"has rope.dimension_count = {rotated} for heads of {width} values")
    settings |= {**known.fixed, **known.more(file)}
    config = AutoConfig.for_model(known.model_type, **settings)
    usual = int(file.required("embedding_length")) // heads
    if (getattr(config, "head_dim", None) or usual) != width:
        config.head_dim = width
    return config


def _architecture(file: GgufFile) -> Architecture:
    known = _ARCHITECTURES.get(file.arch)
    if known is None:
        raise file.error(
            f"has the architecture {file.arch!r}, which is none of those read here "
            f"({', '.join(_ARCHITECTURES)})"
        )
    if "token_embd.weight" not in file.tensors:
        raise file.error("has no weights of the embedding (token_embd.weight)")
    if file.arch == "llama" and file.own("expert_count", 0):
        return _MIXTRAL
    return known


def _head_width(file: GgufFile) -> int:
    usual = int(file.required("embedding_length")) // int(file.required("attention.head_count"))
    widths = [int(file.own(f"attention.{part}_length", usual)) for part in ("key", "value")]
    if widths[0] != widths[1]:
        raise file.error(f"has keys of {widths[0]} and values of {widths[1]} per head")
    return widths[0]


def _has(file: GgufFile, *parts: str) -> bool:
    """True if a block has one of these tensors."""
    return any(name.startswith("blk.") and name.endswith(parts) for name in file.tensors)


_QKV_BIASES = (".attn_q.bias", ".attn_k.bias", ".attn_v.bias")


def _llama(file: GgufFile) -> dict[str, Any]:
    return {
        "attention_bias": _has(file, *_QKV_BIASES, ".attn_output.bias"),
        "mlp_bias": _has(file, ".ffn_gate.bias", ".ffn_up.bias", ".ffn_down.bias"),
    }


def _attention_bias(file: GgufFile) -> dict[str, Any]:
    return {"attention_bias": _has(file, *_QKV_BIASES, ".attn_output.bias")}


def _granite(file: GgufFile) -> dict[str, Any]:
    width = _head_width(file)
    return _llama(file) | {
        "attention_multiplier": file.own("attention.scale", 0.0) or width**-0.5,
        "embedding_multiplier": file.own("embedding_scale", 0.0) or 1.0,
        "residual_multiplier": file.own("residual_scale", 0.0) or 1.0,
        "logits_scaling": file.own("logit_scale", 0.0) or 1.0,
    }


def _qwen2_moe(file: GgufFile) -> dict[str, Any]:
    return {"qkv_bias": _has(file, *_QKV_BIASES)}


def _scale_of(file: GgufFile, *, large: int) -> float:
    """query_pre_attn_scalar; llama.cpp knows the largest model by its number of layers."""
    if file.required("block_count") == large:
        return file.required("embedding_length") / file.required("attention.head_count")
    return _head_width(file)


def _windows(file: GgufFile, period: int) -> list[str]:
    """`layer_types`: the last of `period` layers reads the whole text."""
    count = int(file.required("block_count"))
    given = file.get(f"{file.arch}.attention.sliding_window_pattern", period)
    if not isinstance(given, list):
        given = [given == 0 or index % given < given - 1 for index in range(count)]
    return ["sliding_attention" if each else "full_attention" for each in given]


def _gemma2(file: GgufFile) -> dict[str, Any]:
    theta = file.own("rope.freq_base", 10_000.0)
    if file.own("rope.freq_base_swa", theta) != theta:
        raise file.error("has a rope.freq_base_swa of its own, which is not supported")
    return {
        "head_dim": _head_width(file),
        "attn_logit_softcapping": file.own("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": file.own("final_logit_softcapping", 30.0),
        "sliding_window": file.own("attention.sliding_window", 4096),
        "layer_types": _windows(file, 2),
        "query_pre_attn_scalar": _scale_of(file, large=46),
    }


def _gemma3(file: GgufFile) -> dict[str, Any]:
    window, width = int(file.own("attention.sliding_window", 0)), _head_width(file)
    count = int(file.required("block_count"))
    full = rope_parameters(file, width)
    base = float(file.own("rope.freq_base_swa", 10_000.0))
    swa = {"rope_type": "default", "rope_theta": base}
    return {
        "head_dim": width,
        "final_logit_softcapping": file.own("final_logit_softcapping", 0.0) or None,
        "sliding_window": window or 4096,
        "layer_types": _windows(file, 6) if window else ["full_attention"] * count,
        "query_pre_attn_scalar": _scale_of(file, large=62),
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


def _gpt2(file: GgufFile) -> dict[str, Any]:
    return {"n_inner": file.required("feed_forward_length")}


def _stablelm(file: GgufFile) -> dict[str, Any]:
    parallel = not _has(file, ".ffn_norm.weight")
    if file.own("use_parallel_residual", parallel) != parallel:
        raise file.error("contradicts itself about use_parallel_residual")
    return {"use_qkv_bias": _has(file, *_QKV_BIASES), "use_parallel_residual": parallel}


def _falcon(file: GgufFile) -> dict[str, Any]:
    heads = int(file.required("attention.head_count"))
    kv_heads = int(file.own("attention.head_count_kv", heads))
    file.own("tensor_data_layout")
    return {
        "ffn_hidden_size": file.required("feed_forward_length"),
        "new_decoder_architecture": _has(file, ".attn_norm_2.weight"),
        "multi_query": kv_heads == 1,
        "num_kv_heads": kv_heads,
    }


def _bloom(file: GgufFile) -> dict[str, Any]:
    if file.required("feed_forward_length") != 4 * file.required("embedding_length"):
        raise file.error("has a feed_forward_length that is not 4 times embedding_length")
    file.own("context_length")
    return {}


def _nemotron(file: GgufFile) -> dict[str, Any]:
    file.own("attention.layer_norm_rms_epsilon")  # converters write it, too
    return {}


_EXPERTS = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}
_EXPERTS |= {"expert_feed_forward_length": "moe_intermediate_size"}
_NORMS = {_NORM: "layer_norm_eps"}
_GELU = {"hidden_activation": "gelu_pytorch_tanh", "hidden_act": "gelu_pytorch_tanh"}
_MIXTRAL = Architecture(
    "mixtral",
    _SIZES
    | _RMS
    | {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
    fixed={"sliding_window": None},
)
_ARCHITECTURES = {
    "llama": Architecture("llama", more=_llama),
    "qwen2": Architecture("qwen2", fixed={"use_sliding_window": False}),
    "qwen3": Architecture("qwen3", fixed={"use_sliding_window": False}, more=_attention_bias),
    "qwen2moe": Architecture(
        "qwen2_moe",
        _SIZES
        | _RMS
        | _EXPERTS
        | {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
        fixed={"norm_topk_prob": False, "use_sliding_window": False},
        more=_qwen2_moe,
    ),
    "qwen3moe": Architecture(
        "qwen3_moe",
        _SIZES | _RMS | _EXPERTS,
        fixed={"norm_topk_prob": True, "use_sliding_window": False},
        more=_attention_bias,
    ),
    "granite": Architecture("granite", more=_granite),
    "gemma": Architecture("gemma", fixed=_GELU, more=lambda file: {"head_dim": _head_width(file)}),
    "gemma2": Architecture("gemma2", fixed=_GELU, more=_gemma2),
    "gemma3": Architecture("gemma3_text", fixed=_GELU, more=_gemma3),
    "phi3": Architecture("phi3", more=_phi3, partial=True),
    "gpt2": Architecture(
        "gpt2",
        {
            "context_length": "n_positions",
            "embedding_length": "n_embd",
            "block_count": "n_layer",
            "attention.head_count": "n_head",
            _NORM: "layer_norm_epsilon",
        },
        more=_gpt2,
        grouped=False,
        rotary=False,
    ),
    "starcoder2": Architecture(
        "starcoder2", _SIZES | {_NORM: "norm_epsilon"}, fixed={"sliding_window": None}
    ),
    "stablelm": Architecture("stablelm", _SIZES | _NORMS, more=_stablelm, partial=True),
    "falcon": Architecture(
        "falcon",
        {
            "context_length": "max_position_embeddings",
            "embedding_length": "hidden_size",
            "block_count": "num_hidden_layers",
            "attention.head_count": "num_attention_heads",
            _NORM: "layer_norm_epsilon",
        },
        fixed={"alibi": False, "bias": False, "parallel_attn": True},
        more=_falcon,
        grouped=False,
    ),
    "bloom": Architecture(
        "bloom",
        {
            "embedding_length": "hidden_size",
            "block_count": "n_layer",
            "attention.head_count": "n_head",
            _NORM: "layer_norm_epsilon",
        },
        more=_bloom,
        grouped=False,
        rotary=False,
    ),
    "nemotron": Architecture(
        "nemotron", _SIZES | {_NORM: "norm_eps"}, more=_nemotron, partial=True
    ),
}
