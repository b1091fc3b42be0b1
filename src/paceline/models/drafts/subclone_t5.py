"""Weight subcloning of T5-like models; see `subclone.py` for decoder-only ones.

Self-attention layers of a stack share their position biases, which belong to heads, so they keep
the same heads. Encoder and decoder share their embeddings, so they keep the same hidden channels.
Cross-attention heads and inner channels are chosen per layer.

Paper: Samragh et al. 2023, sections 3.1 and 3.2. Differs: see `subclone.py`.
"""

# D hidden, I inner, H heads, L layers
from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from paceline.errors import UsageError
from paceline.models.contract import Texts
from paceline.models.drafts.answers import sampled_answer
from paceline.models.drafts.heads import new_like
from paceline.models.drafts.importance import (
    HiddenMeter,
    PartMeter,
    attached,
    best,
    channels_of,
    fill,
)
from paceline.models.hf.base import evaluating
from paceline.models.hf.logit_map import logit_map
from paceline.rng import named_generator

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from paceline.models.hf.base import HfModel

_ARCHITECTURES = frozenset({"t5", "mt5", "umt5"})
_TOKENS = 4096  # tokens of answers to measure importance on


class T5Width(NamedTuple):
    """Sizes of a T5's layers; the head size does not change."""

    hidden: int
    inner: int
    num_heads: int


class StackImportance(NamedTuple):
    """Importance of the parts of an encoder or decoder."""

    inner_LI: Tensor
    heads_H: Tensor
    cross_heads_LH: Tensor | None


class T5Importance(NamedTuple):
    """Importance of hidden channels, and of the parts of encoder and decoder."""

    hidden_D: Tensor
    encoder: StackImportance
    decoder: StackImportance


def can_subclone(model: HfModel) -> bool:
    """True if the model is a T5, mT5 or UMT5."""
    return model.hf.config.model_type in _ARCHITECTURES


def t5_width_of(model: HfModel) -> T5Width:
    """Sizes of a T5-like model."""
    config: Any = model.hf.config
    return T5Width(config.d_model, config.d_ff, config.num_heads)


def measure_t5_importance(
    model: HfModel, target: HfModel, sources: Iterable[Sequence[int]], *, seed: int = 0
) -> T5Importance:
    """Measure the importance of each part of a T5 on answers that the target samples.

    Raises:
        UsageError: There is no text.
    """
    stacks = {name: _StackMeters(blocks) for name, blocks in _blocks(model.hf).items()}
    norms = [layer.layer_norm for stack in stacks.values() for layer in stack.layers]
    hidden = HiddenMeter(norms)
    rng = named_generator(seed, "subcloning")
    num_read = 0
    for source in sources:
        if len(source):
            _, answer = sampled_answer(target, source, rng)
            batch = model.trial_batch(answer, source[: model.max_source_length])
            assert isinstance(batch, Texts)
            meters = [hidden, *(meter for stack in stacks.values() for meter in stack.all)]
            with torch.inference_mode(), evaluating(model.hf), attached(meters):
                model.plain_logits(batch)
            num_read += len(answer)
        if num_read >= _TOKENS:
            break
    if not num_read:
        raise UsageError("got no text to rank the target's channels by; give some documents")
    return T5Importance(hidden.total_D, stacks["encoder"].read(), stacks["decoder"].read())


def subclone_t5(target: HfModel, width: T5Width, importance: T5Importance) -> HfModel:
    """Create a model with the same number of layers, each reduced to its most important parts.

    Raises:
        UsageError: A size is larger than the target's.
    """
    old = t5_width_of(target)
    for name, new_size, old_size in zip(T5Width._fields, width, old, strict=True):
        if not 1 <= new_size <= old_size:
            raise UsageError(
                f"{name} of the draft is {new_size}; wanted 1 to the target's {old_size}"
            )
    config: Any = copy.deepcopy(target.hf.config)
    config.d_model, config.d_ff, config.num_heads = width
    source: Any = target.hf
    hf: Any = new_like(source, config).to(target.device)  # pyright: ignore
    hf.to(target.dtype)
    hidden_D = best(importance.hidden_D, width.hidden)
    scale = math.sqrt(old.hidden / width.hidden)
    with torch.no_grad():
        for name, blocks in _blocks(hf).items():
            part: StackImportance = getattr(importance, name)
            _fill_stack(blocks, _blocks(source)[name], part, width, hidden_D)
        hf.get_input_embeddings().weight.copy_(source.get_input_embeddings().weight[:, hidden_D])
        if hf.get_output_embeddings().weight is not hf.get_input_embeddings().weight:
            head = source.get_output_embeddings().weight
            hf.get_output_embeddings().weight.copy_(head[:, hidden_D])
        for name, factor in (
            ("encoder", scale),
            ("decoder", scale * logit_map(source).input_scale / logit_map(hf).input_scale),
        ):
            new, whole = getattr(hf, name), getattr(source, name)
            new.final_layer_norm.weight.copy_(whole.final_layer_norm.weight[hidden_D] * factor)
    hf.generation_config = target.hf.generation_config
    return target.rewrap(hf.eval())


class _StackMeters:
    def __init__(self, blocks: list[Any]) -> None:
        self.layers = [layer for block in blocks for layer in block.layer]
        size = blocks[0].layer[0].SelfAttention.key_value_proj_dim
        self.heads = [PartMeter(block.layer[0].SelfAttention.o, size) for block in blocks]
        crossing = [block.layer[1].EncDecAttention for block in blocks if len(block.layer) == 3]
        self.cross = [PartMeter(attention.o, size) for attention in crossing]
        self.inner = [PartMeter(block.layer[-1].DenseReluDense.wo, 1) for block in blocks]

    @property
    def all(self) -> list[PartMeter]:
        return [*self.heads, *self.cross, *self.inner]

    def read(self) -> StackImportance:
        return StackImportance(
            torch.stack([meter.total_P for meter in self.inner]),
            torch.stack([meter.total_P for meter in self.heads]).sum(0),
            torch.stack([meter.total_P for meter in self.cross]) if self.cross else None,
        )


def _blocks(hf: Any) -> dict[str, list[Any]]:
    return {"encoder": list(hf.encoder.block), "decoder": list(hf.decoder.block)}


def _fill_stack(
    new: list[Any], old: list[Any], part: StackImportance, width: T5Width, hidden_D: Tensor
) -> None:
    heads_H = best(part.heads_H, width.num_heads)
    scale = math.sqrt(len(part.heads_H) / width.num_heads)
    norm_scale = math.sqrt(len(old[0].layer[0].layer_norm.weight) / len(hidden_D))
    for index, (block, source) in enumerate(zip(new, old, strict=True)):
        own, own_source = block.layer[0].SelfAttention, source.layer[0].SelfAttention
        _fill_attention(own, own_source, hidden_D, heads_H, scale)
        if own_source.has_relative_attention_bias:
            biases = own_source.relative_attention_bias.weight
            own.relative_attention_bias.weight.copy_(biases[:, heads_H])
        if part.cross_heads_LH is not None:
            cross_H = best(part.cross_heads_LH[index], width.num_heads)
            cross = block.layer[1].EncDecAttention, source.layer[1].EncDecAttention
            _fill_attention(*cross, hidden_D, cross_H, scale)
        inner_I = best(part.inner_LI[index], width.inner)
        _fill_mlp(
            block.layer[-1].DenseReluDense, source.layer[-1].DenseReluDense, hidden_D, inner_I
        )
        for layer, whole in zip(block.layer, source.layer, strict=True):
            layer.layer_norm.weight.copy_(whole.layer_norm.weight[hidden_D] * norm_scale)


def _fill_attention(new: Any, old: Any, hidden_D: Tensor, heads_H: Tensor, scale: float) -> None:
    channels = channels_of(heads_H, old.key_value_proj_dim)
    for name in ("q", "k", "v"):
        fill(getattr(new, name), getattr(old, name), channels, hidden_D)
    fill(new.o, old.o, hidden_D, channels, scale)


def _fill_mlp(new: Any, old: Any, hidden_D: Tensor, inner_I: Tensor) -> None:
    for name in ("wi", "wi_0", "wi_1"):
        if hasattr(old, name):
            fill(getattr(new, name), getattr(old, name), inner_I, hidden_D)
    fill(new.wo, old.wo, hidden_D, inner_I, math.sqrt(old.wo.in_features / len(inner_I)))
