"""The configuration of a GGUF file: its architecture and its rotary positions."""

# R frequencies of a head
from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import AutoConfig

from paceline.models.hf.architectures import GGUF_CONTEXT

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from transformers import PreTrainedConfig

    from paceline.models.gguf.fields import GgufFile

_SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}
_RMS_NORM, _NORM = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
_RMS = {_RMS_NORM: "rms_norm_eps"}
_QKV_BIASES = (".attn_q.bias", ".attn_k.bias", ".attn_v.bias")
_ATTENTION_BIAS = {"attention_bias": (*_QKV_BIASES, ".attn_output.bias")}
_BIASES = _ATTENTION_BIAS | {"mlp_bias": (".ffn_gate.bias", ".ffn_up.bias", ".ffn_down.bias")}
ROPE_TENSORS = _FACTORS, _LONG, _SHORT = (
    "rope_freqs.weight",
    "rope_factors_long.weight",
    "rope_factors_short.weight",
)
_TOLERANCE = 1e-5  # of a frequency; the file stores float32


@dataclass(frozen=True)
class Architecture:
    """How to read one architecture of llama.cpp.

    Attributes:
        model_type: Of transformers.
        keys: Required keys of the file and the settings that they are.
        fixed: Settings that llama.cpp's implementation implies.
        flags: Settings that are true if a block has one of these tensors.
        more: Further settings from the file; may replace others.
        ignored: Keys that change nothing.
        grouped: Has `num_key_value_heads`.
        rotary: Rotary positions; with `partial`, of a part of each head.
        partial: See `rotary`.
    """

    model_type: str
    keys: Mapping[str, str] = field(default_factory=lambda: _SIZES | _RMS)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    flags: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    more: Callable[[GgufFile], dict[str, Any]] = lambda _file: {}
    ignored: tuple[str, ...] = ()
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
        settings["rope_parameters"] = _rope_parameters(file, rotated)
        if known.partial:
            settings["rope_parameters"]["partial_rotary_factor"] = rotated / width
        elif rotated != width:
            raise file.error(f"has rope.dimension_count = {rotated} for heads of {width} values")
    for key in known.ignored:
        file.own(key)
    flags = {name: _has(file, *tensors) for name, tensors in known.flags.items()}
    settings |= {**known.fixed, **flags, **known.more(file)}
    if settings.get("rope_parameters", {}).get("factor"):
        settings[GGUF_CONTEXT] = settings["max_position_embeddings"]
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


def _granite(file: GgufFile) -> dict[str, Any]:
    width = _head_width(file)
    return {
        "attention_multiplier": file.own("attention.scale", 0.0) or width**-0.5,
        "embedding_multiplier": file.own("embedding_scale", 0.0) or 1.0,
        "residual_multiplier": file.own("residual_scale", 0.0) or 1.0,
        "logits_scaling": file.own("logit_scale", 0.0) or 1.0,
    }


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
    full = _rope_parameters(file, width)
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


def _stablelm(file: GgufFile) -> dict[str, Any]:
    parallel = not _has(file, ".ffn_norm.weight")
    if file.own("use_parallel_residual", parallel) != parallel:
        raise file.error("contradicts itself about use_parallel_residual")
    return {"use_parallel_residual": parallel}


def _falcon(file: GgufFile) -> dict[str, Any]:
    kv_heads = int(file.own("attention.head_count_kv", file.required("attention.head_count")))
    return {"multi_query": kv_heads == 1, "num_kv_heads": kv_heads}


def _bloom(file: GgufFile) -> dict[str, Any]:
    if file.required("feed_forward_length") != 4 * file.required("embedding_length"):
        raise file.error("has a feed_forward_length that is not 4 times embedding_length")
    return {}


def _rope_parameters(file: GgufFile, width: int) -> dict[str, Any]:
    """The settings for heads with `width` rotated values; raises ModelLoadError without any."""
    theta = float(file.own("rope.freq_base", 10_000.0))
    basic: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    kind, factor = _scaling(file)
    original = file.own("rope.scaling.original_context_length")
    attention = float(file.own("rope.scaling.attn_factor", 1.0))
    if kind == "longrope" or _LONG in file.tensors:
        return basic | _longrope(file, original, attention)
    if kind == "yarn":
        return basic | _yarn(file, factor, original, attention)
    if attention != 1.0:
        raise file.error(f"has rope.scaling.attn_factor = {attention:g} without YaRN")
    if _FACTORS in file.tensors:
        if factor != 1.0:
            raise file.error(f"has both {_FACTORS} and rope.scaling.factor = {factor:g}")
        return basic | _by_factors(file, theta, width)
    return basic if factor == 1.0 else basic | {"rope_type": "linear", "factor": factor}


def check_frequencies(file: GgufFile, hf: Any) -> None:
    """Raise if transformers' rotary positions are not those of the file."""
    kind, factor = _scaling(file)
    modules = [each for name, each in hf.named_modules() if name.endswith("rotary_emb")]
    if not modules or kind in ("yarn", "longrope") or _LONG in file.tensors:
        return
    built = type(modules[0])(hf.config)  # the model itself is on the meta device
    found = {name: each for name, each in built.named_buffers() if name.endswith("inv_freq")}
    found_R = found.get("full_attention_inv_freq", found.get("inv_freq"))
    if found_R is None:
        raise file.error("has rotary positions that transformers computes in a way not known here")
    theta, width = float(file.own("rope.freq_base", 10_000.0)), 2 * len(found_R)
    wanted_R = theta ** -(torch.arange(0, width, 2, dtype=torch.float64) / width) / factor
    if _FACTORS in file.tensors:
        wanted_R = wanted_R / _factors(file, _FACTORS)
    if not torch.allclose(found_R.double(), wanted_R, rtol=_TOLERANCE, atol=0):
        raise file.error("has rotary positions that transformers does not compute")


def _scaling(file: GgufFile) -> tuple[str, float]:
    """Type and factor, with llama.cpp's defaults."""
    kind = file.own("rope.scaling.type", "linear")
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise file.error(f"has rope.scaling.type = {kind}, which is not supported")
    older = float(file.own("rope.scale_linear", 0.0))
    factor = float(file.own("rope.scaling.factor", older)) or 1.0
    return kind, 1.0 if kind == "none" else factor


def _factors(file: GgufFile, name: str) -> Tensor:
    return torch.from_numpy(file.tensors[name].data.astype("float64").reshape(-1).copy())


def _yarn(file: GgufFile, factor: float, original: int | None, attention: float) -> dict[str, Any]:
    usual = 1.0 + 0.1 * math.log(factor) if factor > 1.0 else 1.0
    if original is None:
        original = file.required("context_length")
    # transformers' attention_factor: the whole factor; converters store it, llama.cpp mostly
    # ignores it
    stored = float(file.own("rope.scaling.yarn_attn_factor", usual))
    if not math.isclose(stored, usual, rel_tol=1e-5):
        raise file.error(f"has rope.scaling.yarn_attn_factor = {stored:g}, which is not supported")
    found = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    for key, default in (("beta_fast", 32.0), ("beta_slow", 1.0)):
        value = float(file.own(f"rope.scaling.yarn_{key}", default))
        if value != default:
            raise file.error(
                f"has rope.scaling.yarn_{key} = {value:g}, for which llama.cpp takes {default:g}"
            )
    if attention != 1.0:
        found["attention_factor"] = usual * attention
    return found


def _longrope(
    file: GgufFile, original: int | None, attention: float, names: Sequence[str] = (_SHORT, _LONG)
) -> dict[str, Any]:
    if original is None or not file.tensors.keys() >= set(names):
        raise file.error("has long rotary positions without their factors or original length")
    short, long = (_factors(file, name).tolist() for name in names)
    return {
        "rope_type": "longrope",
        "short_factor": short,
        "long_factor": long,
        "original_max_position_embeddings": original,
        "attention_factor": attention,
    }


def _by_factors(file: GgufFile, theta: float, width: int) -> dict[str, Any]:
    """Llama 3's settings if they give these factors, else the factors themselves."""
    factors_R = _factors(file, _FACTORS)
    if len(factors_R) != width // 2:
        raise file.error(f"has {len(factors_R)} values in {_FACTORS}, not {width // 2}")
    if bool((factors_R == 1.0).all()):
        return {}
    turns_R = theta ** -(torch.arange(0, width, 2, dtype=torch.float64) / width) / (2 * math.pi)
    found = _llama3(factors_R, turns_R)
    return found or _longrope(file, file.required("context_length"), 1.0, (_FACTORS, _FACTORS))


def _llama3(factors_R: Tensor, turns_R: Tensor) -> dict[str, Any] | None:
    """Solve transformers' formula for its parameters.

    With t turns per position, a factor is F where t < low / original, 1 where t > high / original,
    and between them 1 / factor = (1 - s) / F + s, s = (original t - low) / (high - low): a line in
    t, of which only original / low and high / low are determined. low is 1, as for all models.
    """
    factor = float(factors_R.max())
    shares_R = (1 / factors_R - 1 / factor) / (1 - 1 / factor) if factor > 1 else factors_R
    between_R = (shares_R > 1e-6) & (shares_R < 1 - 1e-6)
    candidates: list[tuple[float, float]] = []  # original, high
    if int(between_R.sum()) >= 2:
        turns, shares = turns_R[between_R], shares_R[between_R]
        slope = float((shares[0] - shares[-1]) / (turns[0] - turns[-1]))
        offset = slope * float(turns[0]) - float(shares[0])
        if slope > 0 and offset > 0:
            candidates.append((slope / offset, 1 + 1 / offset))
    if bool(between_R.any()):
        turn, share = float(turns_R[between_R][0]), float(shares_R[between_R][0])
        candidates.append(((1 + 3 * share) / turn, 4.0))
    else:
        candidates += [(2.0**power, 4.0) for power in range(4, 24)]
    for original, high in candidates:
        for rounded in ((round(original), round(high)), (round(original), high)):
            if _agrees(factors_R, turns_R, factor, *rounded):
                return {
                    "rope_type": "llama3",
                    "factor": factor,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": float(rounded[1]),
                    "original_max_position_embeddings": rounded[0],
                }
    return None


def _agrees(factors_R: Tensor, turns_R: Tensor, factor: float, original: int, high: float) -> bool:
    if high <= 1.0 or original < 1:
        return False
    share_R = ((original * turns_R - 1) / (high - 1)).clamp(0, 1)
    wanted_R = 1 / ((1 - share_R) / factor + share_R)
    return torch.allclose(wanted_R, factors_R, rtol=_TOLERANCE, atol=0)


_EXPERTS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
_SHARED_EXPERT = {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"}
_MIXTRAL_EXPERTS = _EXPERTS | {"expert_count": "num_local_experts"}
_MIXTRAL_EXPERTS.pop("expert_feed_forward_length")
_GELU = {"hidden_activation": "gelu_pytorch_tanh", "hidden_act": "gelu_pytorch_tanh"}
_NO_WINDOW = {"use_sliding_window": False}
_MIXTRAL = Architecture("mixtral", _SIZES | _RMS | _MIXTRAL_EXPERTS, fixed={"sliding_window": None})
_ARCHITECTURES = {
    "llama": Architecture("llama", flags=_BIASES),
    "qwen2": Architecture("qwen2", fixed=_NO_WINDOW),
    "qwen3": Architecture("qwen3", fixed=_NO_WINDOW, flags=_ATTENTION_BIAS),
    "qwen2moe": Architecture(
        "qwen2_moe",
        _SIZES | _RMS | _EXPERTS | _SHARED_EXPERT,
        fixed=_NO_WINDOW | {"norm_topk_prob": False},
        flags={"qkv_bias": _QKV_BIASES},
    ),
    "qwen3moe": Architecture(
        "qwen3_moe",
        _SIZES | _RMS | _EXPERTS,
        fixed=_NO_WINDOW | {"norm_topk_prob": True},
        flags=_ATTENTION_BIAS,
    ),
    "granite": Architecture("granite", flags=_BIASES, more=_granite),
    "gemma": Architecture("gemma", fixed=_GELU, more=lambda file: {"head_dim": _head_width(file)}),
    "gemma2": Architecture("gemma2", fixed=_GELU, more=_gemma2),
    "gemma3": Architecture("gemma3_text", fixed=_GELU, more=_gemma3),
    "phi3": Architecture("phi3", more=_phi3, partial=True),
    "gpt2": Architecture(
        "gpt2",
        _SIZES | {"feed_forward_length": "n_inner", _NORM: "layer_norm_epsilon"},
        grouped=False,
        rotary=False,
    ),
    "starcoder2": Architecture(
        "starcoder2", _SIZES | {_NORM: "norm_epsilon"}, fixed={"sliding_window": None}
    ),
    "stablelm": Architecture(
        "stablelm",
        _SIZES | {_NORM: "layer_norm_eps"},
        flags={"use_qkv_bias": _QKV_BIASES},
        more=_stablelm,
        partial=True,
    ),
    "falcon": Architecture(
        "falcon",
        _SIZES | {"feed_forward_length": "ffn_hidden_size", _NORM: "layer_norm_epsilon"},
        fixed={"alibi": False, "bias": False, "parallel_attn": True},
        flags={"new_decoder_architecture": (".attn_norm_2.weight",)},
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
        ignored=("context_length",),
        grouped=False,
        rotary=False,
    ),
    "nemotron": Architecture(
        "nemotron", _SIZES | {_NORM: "norm_eps"}, ignored=(_RMS_NORM,), partial=True
    ),
}
