"""What a configuration tells: architectures that cannot forget tokens, and how long texts may get.

Known ones that cannot are refused by name before any weight is read. Every other model has to show
that it can, on three tokens: see rollback.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.errors import UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# keep running sums or convolutions over the text instead of its keys and values
_RUNNING_STATE = """
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
    """Refuse what is known not to work, from the configuration alone.

    Raises:
        UnsupportedModelError: An encoder-decoder, or layers that keep a running state.
    """
    name = config.model_type
    text = config.get_text_config(decoder=True)
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"{name} is an encoder-decoder, and Paceline decodes with decoder-only models; {ADVICE}"
        )
    if {name, text.model_type} & set(_RUNNING_STATE.split()):
        raise UnsupportedModelError(
            f"{name} keeps a running state, which cannot forget rejected tokens; {ADVICE}"
        )
    ropes = _ropes(text)
    if any(rope.get("rope_type") == "dynamic" for rope in ropes):
        raise UnsupportedModelError(
            f"{name} uses rope of the kind dynamic, which moves old positions when the text grows; set "
            "another rope_type in config.json"
        )
    strange = set(getattr(text, "layer_types", None) or ()) - _ROLLS_BACK
    if strange:
        raise UnsupportedModelError(
            f"{name} has layers of the kind {', '.join(sorted(strange))}, which Paceline cannot roll "
            f"back; {ADVICE}"
        )


def context_length(config: PreTrainedConfig) -> int | None:
    """Longest text that keeps every position where it was; None if nothing limits it.

    With rope of the kind longrope, that is the original context: beyond it all positions are
    rescaled, and what the cache holds would no longer be what a plain pass computes.
    """
    text = config.get_text_config(decoder=True)
    limits: list[Any] = [getattr(text, "max_position_embeddings", None)]
    for rope in _ropes(text):
        if rope.get("rope_type") == "longrope":
            name = "original_max_position_embeddings"
            limits += [rope.get(name), getattr(text, name, None)]
    return min((limit for limit in limits if isinstance(limit, int) and limit > 0), default=None)


def _ropes(text: PreTrainedConfig) -> list[dict[str, Any]]:
    """Rope settings, of which some models have one for each kind of layer."""
    settings = getattr(text, "rope_parameters", None) or {}
    nested = [value for value in settings.values() if isinstance(value, dict)]
    return nested or [settings]
