"""Refuses architectures that cannot roll back, and computes context lengths.

Known architectures are refused from the configuration alone; others are tested, see rollback.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.errors import UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# recurrent or convolutional state instead of keys and values
_RECURRENT = """
    bailing_hybrid bamba falcon_h1 falcon_mamba glm5_next granitemoehybrid inkling inkling_text
    inkling2 inkling2_text jamba kimi_linear lfm2 lfm2_moe lfm3 mamba mamba2 minimax nemotron_h
    olmo_hybrid qwen3_5 qwen3_5_text qwen3_5_moe qwen3_5_moe_text qwen3_next qwen4_exp
    qwen4_exp_text recurrent_gemma rwkv xlstm zamba zamba2 zaya
"""
_ROLLS_BACK = frozenset({"full_attention", "sliding_attention"})
ADVICE = (
    "choose a decoder-only model whose cache holds plain keys and values (Llama, Qwen3, GPT-2 …)"
)


def refuse_by_name(config: PreTrainedConfig) -> None:
    """Refuse unsupported architectures, from the configuration alone.

    Raises:
        UnsupportedModelError: An encoder-decoder, dynamic rope, recurrent or unknown layers.
    """
    name = config.model_type
    text = config.get_text_config(decoder=True)
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"{name} is an encoder-decoder, but Paceline supports decoder-only models; {ADVICE}"
        )
    if {name, text.model_type} & set(_RECURRENT.split()):
        raise UnsupportedModelError(
            f"{name} has a recurrent state, which cannot be rolled back; {ADVICE}"
        )
    if any(rope.get("rope_type") == "dynamic" for rope in _ropes(text)):
        raise UnsupportedModelError(
            f"{name} uses rope_type dynamic, which changes old positions when the text grows; set "
            "another rope_type in config.json"
        )
    unknown = set(getattr(text, "layer_types", None) or ()) - _ROLLS_BACK
    if unknown:
        raise UnsupportedModelError(
            f"{name} has layers of type {', '.join(sorted(unknown))}, which Paceline cannot roll "
            f"back; {ADVICE}"
        )


def context_length(config: PreTrainedConfig) -> int | None:
    """The context length, or None if there is no limit.

    With rope_type longrope it is the original context length: a longer text rescales all positions,
    and the cache would differ from a pass without a cache.
    """
    text = config.get_text_config(decoder=True)
    limits: list[Any] = [getattr(text, "max_position_embeddings", None)]
    for rope in _ropes(text):
        if rope.get("rope_type") == "longrope":
            name = "original_max_position_embeddings"
            limits += [rope.get(name), getattr(text, name, None)]
    return min((limit for limit in limits if isinstance(limit, int) and limit > 0), default=None)


def _ropes(text: PreTrainedConfig) -> list[dict[str, Any]]:
    settings = getattr(text, "rope_parameters", None) or {}  # nested per layer type in some models
    nested = [value for value in settings.values() if isinstance(value, dict)]
    return nested or [settings]
