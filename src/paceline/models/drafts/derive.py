"""Creates a smaller draft with random weights in the target's architecture."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch

from paceline.errors import UnsupportedModelError, UsageError
from paceline.models.drafts.scratch import draw_weights, new_like
from paceline.models.hf.architectures import (
    is_encoder_decoder,
    num_decoder_layers,
    shorten_config,
)

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from paceline.models.hf.base import HfModel

_STEPS = (64, 16, 1)  # hidden sizes are multiples of the first that divides the target's
_ROUND = 16  # inner sizes are multiples of this
_FULL = "full_attention"
_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads")


def derive_draft(
    target: HfModel, share: float, *, num_layers: int | None = None, seed: int = 0
) -> HfModel:
    """Create the widest draft with at most `share` of the target's parameters, in float32.

    Inner size, heads and key heads are in proportion to the target's; the head size is the same.

    Args:
        target: Gives architecture, tokenizer and proportions.
        share: In (0, 1).
        num_layers: Number of layers; None for an eighth of the target's.
        seed: Seed of the random weights.

    Raises:
        UsageError: No draft with this vocabulary is so small, or the target has fewer layers.
        UnsupportedModelError: The target is an encoder-decoder, or its config lacks the usual names
            of sizes.
    """
    config = target.hf.config
    if is_encoder_decoder(config):
        raise UnsupportedModelError(
            f"{config.model_type} is an encoder-decoder, which gets no smaller copy with random "
            "weights; use a subset of its layers"
        )
    if any(getattr(config, name, None) is None for name in _SIZES):
        raise UnsupportedModelError(
            f"the config of {config.model_type} lacks one of {', '.join(_SIZES)}; use a subset of "
            "its layers"
        )
    count = num_decoder_layers(config)
    depth = max(1, round(count / 8)) if num_layers is None else num_layers
    if not 1 <= depth <= count:
        raise UsageError(f"got {depth} layers; wanted 1 to the target's {count}")
    hf = _widest(target, depth, share * target.num_parameters)
    draw_weights(hf, seed)
    hf.generation_config = target.hf.generation_config
    return target.rewrap(hf.eval())


def _widest(target: HfModel, depth: int, most: float) -> PreTrainedModel:
    """The widest model with at most `most` parameters; its weights are not initialized."""
    smallest = None
    for width in reversed(_widths(target.hf.config)):
        config = _narrowed(target.hf.config, width, depth)
        with torch.device("meta"):
            size = new_like(target.hf, config).num_parameters()
        if size <= most:
            return new_like(target.hf, config).float().to(target.device)  # pyright: ignore
        smallest = size
    share = 1.0 if smallest is None else smallest / target.num_parameters
    raise UsageError(
        f"the smallest draft of {depth} layers with this vocabulary has {share:.1%} of the "
        "target's parameters; request more, or reduce the target's vocabulary first"
    )


def _widths(config: PreTrainedConfig) -> range:
    """Candidate hidden sizes: multiples of a step, or of a group of heads if these add up to it."""
    if getattr(config, "head_dim", None) is None:
        step = _group(config) * config.hidden_size // config.num_attention_heads
    else:
        step = next(step for step in _STEPS if config.hidden_size % step == 0)
    return range(step, config.hidden_size + 1, step)


def _narrowed(config: PreTrainedConfig, width: int, depth: int) -> PreTrainedConfig:
    """The config with fewer and narrower layers, of heads of the same size in complete groups."""
    new: Any = copy.deepcopy(config)
    count = new.num_hidden_layers
    shorten_config(new, [(layer + 1) * count // depth - 1 for layer in range(depth)])
    # with sliding windows only, the draft would never attend to the beginning of a text
    types = getattr(config, "layer_types", None) or ()
    if _FULL in types and _FULL not in new.layer_types:
        new.layer_types[-1] = _FULL
    group = _group(config)
    groups = max(1, round(new.num_attention_heads // group * width / new.hidden_size))
    if getattr(new, "num_key_value_heads", None) is not None:
        new.num_key_value_heads = groups
    inner = getattr(new, "intermediate_size", None)
    if inner is not None:
        new.intermediate_size = _ROUND * max(1, round(inner * width / new.hidden_size / _ROUND))
    new.hidden_size, new.num_attention_heads = width, groups * group
    return new


def _group(config: PreTrainedConfig) -> int:
    """Query heads per key head."""
    key_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return config.num_attention_heads // key_heads
