"""Which architectures can forget their last tokens, and proof that this one does.

Known ones that cannot are refused by name before any weight is read. Every other model has to show
it on three tokens: an architecture nobody has heard of is refused rather than silently wrong.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import DynamicLayer

from paceline.errors import UnsupportedModelError
from paceline.models.agreement import (
    difference,
    plain_logits,
    rolled_back_logits,
    tolerance_for,
)
from paceline.models.causal_session import CausalSession

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedConfig

    from paceline.models.causal import CausalModel

# keep running sums or convolutions over the text instead of its keys and values
_RUNNING_STATE = """
    bailing_hybrid bamba falcon_h1 falcon_mamba glm5_next granitemoehybrid inkling inkling_text
    inkling2 inkling2_text jamba kimi_linear lfm2 lfm2_moe lfm3 mamba mamba2 minimax nemotron_h
    olmo_hybrid qwen3_5 qwen3_5_text qwen3_5_moe qwen3_5_moe_text qwen3_next qwen4_exp
    qwen4_exp_text recurrent_gemma rwkv xlstm zamba zamba2 zaya
"""
# proved over random sequences of reading and rolling back by tests/property/test_session.py
PROVEN = ("bloom", "gemma3_text", "gpt2", "gpt_neox", "llama", "mistral", "opt", "qwen2", "qwen3")
_ROLLS_BACK = frozenset({"full_attention", "sliding_attention"})
_ADVICE = (
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
            f"{name} is an encoder-decoder, and Paceline decodes with decoder-only models; {_ADVICE}"
        )
    if {name, text.model_type} & set(_RUNNING_STATE.split()):
        raise UnsupportedModelError(
            f"{name} keeps a running state, which cannot forget rejected tokens; {_ADVICE}"
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
            f"back; {_ADVICE}"
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


def prove_rollback(model: CausalModel) -> None:
    """Read three tokens in a ragged batch with a roll-back, and compare with a plain pass.

    Raises:
        UnsupportedModelError: The cache is not plain keys and values, or the logits differ.
    """
    name = model.hf.config.model_type
    if name in PROVEN:
        return
    try:
        wanted, got = plain_logits(model), _rolled_back_logits(model)
    except torch.OutOfMemoryError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as e:
        reason = str(e).strip().split("\n")[0]
        raise UnsupportedModelError(
            f"{name} failed a trial of reading and rolling back three tokens ({reason}); {_ADVICE}"
        ) from e
    if not difference(wanted, got) <= tolerance_for(model.dtype):
        raise UnsupportedModelError(
            f"{name} gives other logits after a roll-back than in a plain pass, so its text would be "
            f"wrong; {_ADVICE}"
        )


def _rolled_back_logits(model: CausalModel) -> Tensor:
    session = CausalSession(model)
    logits = rolled_back_logits(model, session)
    layers: list[Any] = session.cache.layers
    plain = [isinstance(layer, DynamicLayer) and layer.is_initialized for layer in layers]
    text_config = model.hf.config.get_text_config(decoder=True)
    if len(layers) != text_config.num_hidden_layers or not all(plain):
        raise ValueError("its cache is not one set of keys and values a layer")
    return logits
