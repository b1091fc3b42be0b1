"""Checks that a model can roll back its cache, and refuses architectures that cannot."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import DynamicLayer

from paceline.errors import UnsupportedModelError
from paceline.models.hf.agreement import (
    difference,
    plain_logits,
    rolled_back_logits,
    tolerance_for,
)
from paceline.models.hf.architectures import ADVICE, num_decoder_layers

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.models.hf.base import HfModel

# tested with random sequences of session calls in tests/property/test_session.py
DECODER_ONLY = ("bloom", "gemma3_text", "gpt2", "gpt_neox", "llama", "mistral", "opt")
DECODER_ONLY += ("qwen2", "qwen3")
ENCODER_DECODERS = ("bart", "marian", "mbart", "mt5", "pegasus", "t5", "umt5")
PROVEN = DECODER_ONLY + ENCODER_DECODERS


def check_rollback(model: HfModel) -> None:
    """Raise an UnsupportedModelError if logits differ after a rollback, or on other caches."""
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
            f"{name} failed a test of rolling back the cache ({reason}); {ADVICE}"
        ) from e
    if not difference(wanted, got) <= tolerance_for(model.dtype):
        raise UnsupportedModelError(
            f"{name} gives different logits after a rollback than without a cache, so its output "
            f"would be wrong; {ADVICE}"
        )


def _rolled_back_logits(model: HfModel) -> Tensor:
    session: Any = model.start_session()
    logits = rolled_back_logits(model, session)
    layers: list[Any] = session.cache.layers
    plain = [isinstance(layer, DynamicLayer) and layer.is_initialized for layer in layers]
    if len(layers) != num_decoder_layers(model.hf.config) or not all(plain):
        raise ValueError("its cache is not one set of keys and values per layer")
    return logits
