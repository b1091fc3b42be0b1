"""A new draft in its target's architecture, with random weights and a part of its parameters."""

# V vocabulary, D the target's hidden width, W the draft's
from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from paceline.errors import UnsupportedModelError, UsageError
from paceline.models.drafts.layers import shorten_config
from paceline.models.drafts.scratch import draw_weights
from paceline.models.hf.causal import CausalModel

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

Embeddings = Literal["target", "random"]

# Of the hidden widths that are tried: the first that the target's is a multiple of.
_STEPS = (64, 16, 1)
_ROUND = 16  # inner widths are multiples of it
_WHOLE = "full_attention"
_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads")


def derive_draft(
    target: CausalModel,
    share: float,
    *,
    num_layers: int | None = None,
    embeddings: Embeddings = "target",
    seed: int = 0,
) -> CausalModel:
    """The widest draft of at most `share` of the target's parameters, float32.

    An eighth of the target's layers if nothing else is said; inner width, heads and key heads in the
    target's proportions, heads of its size.

    Args:
        target: Gives architecture, tokenizer and proportions.
        share: Of its parameters, in (0, 1).
        num_layers: Depth.
        embeddings: `target` begins with the target's embeddings and head, in their principal
            directions where the draft is narrower.
        seed: Of the random weights.

    Raises:
        UsageError: No draft over this vocabulary is so small, or the target has fewer layers.
        UnsupportedModelError: The target's sizes are not told in the usual names.
    """
    config = target.hf.config
    if any(getattr(config, name, None) is None for name in _SIZES):
        raise UnsupportedModelError(
            f"{config.model_type} does not tell its sizes in the usual names; choose layers of it"
        )
    depth = max(1, round(config.num_hidden_layers / 8)) if num_layers is None else num_layers
    if not 1 <= depth <= config.num_hidden_layers:
        raise UsageError(f"got {depth} layers; wanted 1 to the target's {config.num_hidden_layers}")
    hf = _widest(target, depth, share * target.num_parameters)
    draw_weights(hf, seed)
    if embeddings == "target":
        _take_embeddings(hf, target.hf)
    hf.generation_config = target.hf.generation_config
    return CausalModel(hf.eval(), target.tokenizer)


def _widest(target: CausalModel, depth: int, most: float) -> PreTrainedModel:
    """The widest model of so many layers and at most so many parameters, weights undefined."""
    kind = type(target.hf)
    smallest = None
    for width in reversed(_widths(target.hf.config)):
        config = _narrowed(target.hf.config, width, depth)
        with torch.device("meta"):
            size = sum(weight.numel() for weight in kind(config).parameters())
        if size <= most:
            return kind(config).float().to(target.device)  # pyright: ignore
        smallest = size
    share = 1.0 if smallest is None else smallest / target.num_parameters
    raise UsageError(
        f"the smallest draft of {depth} layers over this vocabulary has {share:.1%} of the target's "
        "parameters; ask for more, or cut the target's vocabulary first"
    )


def _widths(config: PreTrainedConfig) -> range:
    """Hidden widths that are tried: round ones, or of whole heads where these make up the width."""
    if getattr(config, "head_dim", None) is None:
        step = _group(config) * config.hidden_size // config.num_attention_heads
    else:
        step = next(step for step in _STEPS if config.hidden_size % step == 0)
    return range(step, config.hidden_size + 1, step)


def _narrowed(config: PreTrainedConfig, width: int, depth: int) -> PreTrainedConfig:
    """The same architecture with fewer and narrower layers: heads of the old size, in whole groups."""
    new: Any = copy.deepcopy(config)
    count = new.num_hidden_layers
    shorten_config(new, [(layer + 1) * count // depth - 1 for layer in range(depth)])
    _see_far(new, config)
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
    """Heads that share a key head, or one."""
    key_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return config.num_attention_heads // key_heads


def _see_far(new: Any, config: PreTrainedConfig) -> None:
    """A draft of sliding windows alone would never see the beginning of a text."""
    kinds = getattr(config, "layer_types", None) or ()
    if _WHOLE in kinds and _WHOLE not in new.layer_types:
        new.layer_types[-1] = _WHOLE


def _take_embeddings(hf: PreTrainedModel, target: PreTrainedModel) -> None:
    """Input embeddings and head of the target's, as many of their directions as there is room for."""
    new: Any = hf.get_input_embeddings()
    old: Any = target.get_input_embeddings()
    directions_DW = _directions(old.weight.detach().float(), new.weight.shape[1])
    with torch.no_grad():
        new.weight.copy_(old.weight.float() @ directions_DW)
        new_head: Any = hf.get_output_embeddings()
        old_head: Any = target.get_output_embeddings()
        if new_head is not None and new_head.weight is not new.weight:
            directions_DW = _directions(old_head.weight.detach().float(), new.weight.shape[1])
            new_head.weight.copy_(old_head.weight.float() @ directions_DW)


def _directions(weight_VD: Tensor, width: int) -> Tensor:
    """Those in which the rows are longest, [D, W]; all of them, unturned, if there is room."""
    if width == weight_VD.shape[1]:
        return torch.eye(width, device=weight_VD.device)
    _, vectors_DD = torch.linalg.eigh(weight_VD.T @ weight_VD)
    return vectors_DD[:, -width:].flip(-1)
