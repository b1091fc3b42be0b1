"""Weight subcloning: creates a narrower draft from the most important parts of the target.

Scaling compensates for the parts that are removed. The squared norm of an RMS norm's output equals
the hidden size, so norm weights are multiplied by sqrt(D / D'), D' the new hidden size. Output
projections of heads and MLPs are multiplied by the root of the ratio of their input sizes.

Paper: Samragh et al. 2023, sections 3.1 and 3.2. Differs: heads and inner channels are ranked by
what they add to the residual stream, per layer; key heads stay with their query heads.
"""

# N tokens, D hidden, I inner, H heads, K key heads, S head size
from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from paceline.errors import UnsupportedModelError, UsageError
from paceline.models.drafts.importance import (
    HiddenMeter,
    PartMeter,
    attached,
    best,
    channels_of,
    fill,
)
from paceline.models.hf.base import HfModel, evaluating
from paceline.models.llama.forward import LlamaDecoder

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_TOKENS = 4096  # tokens to measure importance on
_LONGEST = 256  # tokens processed per text


class Width(NamedTuple):
    """Sizes of a model's layers; the head size does not change."""

    hidden: int
    inner: int
    num_heads: int
    num_key_heads: int


class Importance(NamedTuple):
    """Importance of hidden channels, and of each layer's inner channels and heads."""

    hidden_D: Tensor
    inner_LI: Tensor
    heads_LH: Tensor


def width_of(model: HfModel) -> Width:
    """Sizes of a Llama-like model."""
    config: Any = _checked(model).hf.config
    num_heads, num_key_heads = config.num_attention_heads, config.num_key_value_heads
    return Width(config.hidden_size, config.intermediate_size, num_heads, num_key_heads)


def measure_importance(target: HfModel, texts: Iterable[Sequence[int]]) -> Importance:
    """Measure the importance of each part of a Llama-like model on these texts.

    For a channel of the residual stream: its mean absolute value after the norms. For an inner
    channel or a head: the mean norm of what it adds to the residual stream.

    Raises:
        UsageError: There is no text.
        UnsupportedModelError: The model is not Llama-like.
    """
    layers = _layers(_checked(target))
    size = layers[0].self_attn.head_dim
    norms = ("input_layernorm", "post_attention_layernorm")
    hidden = HiddenMeter(getattr(layer, name) for layer in layers for name in norms)
    heads = [PartMeter(layer.self_attn.o_proj, size) for layer in layers]
    inner = [PartMeter(layer.mlp.down_proj, 1) for layer in layers]
    longest = min(_LONGEST, target.max_length or _LONGEST)
    num_read = 0
    with torch.inference_mode(), evaluating(target.hf), attached([hidden, *heads, *inner]):
        for text in texts:
            if len(text):
                tokens = torch.tensor(list(text[:longest]), device=target.device)
                target.hf.base_model(input_ids=tokens[None], use_cache=False)
                num_read += len(tokens)
            if num_read >= _TOKENS:
                break
    if not num_read:
        raise UsageError("got no text to rank the target's channels by; give some documents")
    inner_LI, heads_LH = (
        torch.stack([meter.total_P for meter in meters]) for meters in (inner, heads)
    )
    return Importance(hidden.total_D / num_read, inner_LI / num_read, heads_LH / num_read)


def subclone(target: HfModel, width: Width, importance: Importance) -> HfModel:
    """Create a model with the same number of layers, each reduced to its most important parts.

    To reduce the number of layers as well, do so first: `importance` must be that of `target`.

    Raises:
        UsageError: A size is larger than the target's, or the numbers of heads are inconsistent.
        UnsupportedModelError: The model is not Llama-like.
    """
    old = width_of(target)
    _check(width, old)
    hidden_D = best(importance.hidden_D, width.hidden)
    config: Any = copy.deepcopy(target.hf.config)
    config.head_dim = _layers(target)[0].self_attn.head_dim
    config.hidden_size, config.intermediate_size = width.hidden, width.inner
    config.num_attention_heads, config.num_key_value_heads = width.num_heads, width.num_key_heads
    hf = type(target.hf)(config).to(target.device)  # pyright: ignore
    for weight in hf.parameters():  # buffers, such as rope frequencies, keep their precision
        weight.data = weight.data.to(target.dtype)
    body: Any = hf.base_model
    source: Any = target.hf.base_model
    scale = math.sqrt(old.hidden / width.hidden)
    with torch.no_grad():
        for index, (new, layer) in enumerate(zip(body.layers, _layers(target), strict=True)):
            heads_H, keys_K = _best_heads(importance.heads_LH[index], old, width)
            inner_I = best(importance.inner_LI[index], width.inner)
            _fill_attention(new.self_attn, layer.self_attn, hidden_D, heads_H, keys_K)
            _fill_mlp(new.mlp, layer.mlp, hidden_D, inner_I)
            for name in ("input_layernorm", "post_attention_layernorm"):
                getattr(new, name).weight.copy_(getattr(layer, name).weight[hidden_D] * scale)
        body.norm.weight.copy_(source.norm.weight[hidden_D] * scale)
        body.embed_tokens.weight.copy_(source.embed_tokens.weight[:, hidden_D])
        new_head: Any = hf.get_output_embeddings()
        head: Any = target.hf.get_output_embeddings()
        if new_head.weight is not body.embed_tokens.weight:
            new_head.weight.copy_(head.weight[:, hidden_D])
    hf.generation_config = target.hf.generation_config
    return target.rewrap(hf.eval())


def _fill_attention(new: Any, old: Any, hidden_D: Tensor, heads_H: Tensor, keys_K: Tensor) -> None:
    size = old.head_dim
    queries, keys = channels_of(heads_H, size), channels_of(keys_K, size)
    for name, rows in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
        fill(getattr(new, name), getattr(old, name), rows, hidden_D)
    scale = math.sqrt(old.o_proj.in_features / len(queries))
    fill(new.o_proj, old.o_proj, hidden_D, queries, scale)
    for name in ("q_norm", "k_norm"):
        if getattr(old, name, None) is not None:
            getattr(new, name).weight.copy_(getattr(old, name).weight)


def _fill_mlp(new: Any, old: Any, hidden_D: Tensor, inner_I: Tensor) -> None:
    for name in ("gate_proj", "up_proj"):
        fill(getattr(new, name), getattr(old, name), inner_I, hidden_D)
    scale = math.sqrt(old.down_proj.in_features / len(inner_I))
    fill(new.down_proj, old.down_proj, hidden_D, inner_I, scale)


def _best_heads(importance_H: Tensor, old: Width, new: Width) -> tuple[Tensor, Tensor]:
    """The query and key heads to keep: the best groups, each with its best query heads."""
    groups_KG = importance_H.reshape(old.num_key_heads, -1)
    per_group = new.num_heads // new.num_key_heads
    best_KG = groups_KG.argsort(dim=-1, descending=True, stable=True)[:, :per_group].sort(-1).values
    keys_K = best(groups_KG.gather(-1, best_KG).sum(-1), new.num_key_heads)
    heads_KG = best_KG[keys_K] + keys_K[:, None] * groups_KG.shape[1]
    return heads_KG.flatten(), keys_K


def _check(width: Width, old: Width) -> None:
    for name, new_size, old_size in zip(Width._fields, width, old, strict=True):
        if not 1 <= new_size <= old_size:
            raise UsageError(
                f"{name} of the draft is {new_size}; wanted 1 to the target's {old_size}"
            )
    if width.hidden % width.num_heads:
        raise UsageError(
            f"the hidden size {width.hidden} is not a multiple of {width.num_heads} heads, which "
            "engines require; change one of them"
        )
    if width.num_heads % width.num_key_heads:
        raise UsageError(
            f"{width.num_heads} heads are not a multiple of {width.num_key_heads} key heads; "
            "change one of them"
        )
    if width.num_heads // width.num_key_heads > old.num_heads // old.num_key_heads:
        raise UsageError(
            f"{width.num_heads} heads for {width.num_key_heads} key heads are more per key head "
            f"than the target's {old.num_heads} for {old.num_key_heads}; keep more key heads"
        )


def _checked(model: HfModel) -> HfModel:
    if not LlamaDecoder.supports(model.hf):
        raise UnsupportedModelError(
            f"{model.hf.config.model_type} is neither Llama-like nor a T5, so it cannot be made "
            "narrower; use a subset of its layers, or a new draft (--params)"
        )
    return model


def _layers(model: HfModel) -> list[Any]:
    body: Any = model.hf.base_model
    return list(body.layers)
