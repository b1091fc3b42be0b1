"""Weight subcloning: creates a narrower draft from the most important parts of the target.

Scaling compensates for the parts that are removed. The squared norm of an RMS norm's output equals
the hidden size, so norm weights are multiplied by sqrt(D / D'), D' the new hidden size. Output
projections of heads and MLPs are multiplied by the root of the ratio of their input sizes.

Paper: Samragh et al. 2023, sections 3.1 and 3.2. Differs: heads and inner channels are ranked by
what they add to the residual stream, per layer; key heads stay with their query heads.
"""

# N tokens, D hidden, I inner, H heads, K key heads, G heads per key head, L layers, P parts, S size
# of a part
from __future__ import annotations

import contextlib
import copy
import functools
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from paceline.errors import UnsupportedModelError, UsageError
from paceline.models.drafts.scratch import new_like
from paceline.models.hf.architectures import is_tied
from paceline.models.hf.base import HfModel, evaluating
from paceline.models.llama.cpu_weights import is_llama_like

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Sequence

_TOKENS = 4096  # tokens to measure importance on
_LONGEST = 256  # tokens processed per text


class Width(NamedTuple):
    """Sizes of a model's layers; the head size does not change."""

    hidden: int
    inner: int
    num_heads: int
    num_key_heads: int


class Importance(NamedTuple):
    """Importance of hidden channels, and of the inner channels and heads of each layer."""

    hidden_D: Tensor
    inner_LI: Tensor
    heads_LH: Tensor


def width_of(model: HfModel) -> Width:
    """Sizes of a Llama-like model."""
    config: Any = model.hf.config
    if not is_llama_like(model.hf):
        raise UnsupportedModelError(
            f"{config.model_type} is not Llama-like, so it cannot be made narrower; use a subset "
            "of its layers"
        )
    num_heads, num_key_heads = config.num_attention_heads, config.num_key_value_heads
    return Width(config.hidden_size, config.intermediate_size, num_heads, num_key_heads)


def width_with(model: HfModel, sizes: Iterable[int | None]) -> Width:
    """The width with these sizes; None for those of the model."""
    pairs = zip(sizes, width_of(model), strict=True)
    return Width(*(size or own for size, own in pairs))


def measure_importance(model: HfModel, texts: Iterable[Sequence[int]]) -> Importance:
    """Measure the importance of each part of a model on these texts.

    For a channel of the residual stream: its mean absolute value after the norms. For an inner
    channel or a head: the mean norm of what it adds to the residual stream.

    Raises:
        UsageError: There is no text.
        UnsupportedModelError: The model is not Llama-like.
    """
    width_of(model)
    parts = _parts(model.hf)
    sums = Importance(
        torch.zeros(len(parts.norms[0].weight)),
        torch.zeros(len(parts.mlps), parts.mlps[0].out.in_features),
        torch.zeros(len(parts.attentions), parts.attentions[0].num_heads),
    )
    num_read = 0
    for text in texts:
        if not len(text):
            continue
        new = text[: min(_LONGEST, model.max_length or _LONGEST)]
        with torch.inference_mode(), evaluating(model.hf), _summed(parts, sums):
            model.plain_logits(model.trial_batch(new))
        num_read += len(new)
        if num_read >= _TOKENS:
            break
    if not num_read:
        raise UsageError("got no text to rank the target's channels by; give some documents")
    return Importance(*(total / num_read for total in sums))


def subclone(target: HfModel, width: Width, importance: Importance) -> HfModel:
    """Create a model with the same number of layers, each reduced to its most important parts.

    To reduce the number of layers as well, do so first: `importance` must be that of `target`.

    Raises:
        UsageError: A size is larger than the target's, or the numbers of heads are inconsistent.
        UnsupportedModelError: The model is not Llama-like.
    """
    old = width_of(target)
    _check(width, old)
    source: Any = target.hf
    hf: Any = new_like(source, _narrowed(source, width)).to(target.device)  # pyright: ignore
    for weight in hf.parameters():  # buffers, such as rope frequencies, keep their precision
        weight.data = weight.data.to(target.dtype)
    parts, wholes = _parts(hf), _parts(source)
    hidden_D = _best(importance.hidden_D, width.hidden)
    scale = math.sqrt(old.hidden / width.hidden)
    with torch.no_grad():
        _fill_attentions(parts, wholes, importance.heads_LH, width, hidden_D)
        for mlp, whole, importance_I in zip(
            parts.mlps, wholes.mlps, importance.inner_LI, strict=True
        ):
            inner_I = _best(importance_I, width.inner)
            for new, wider in zip(mlp.inputs, whole.inputs, strict=True):
                _fill(new, wider, inner_I, hidden_D)
            grown = math.sqrt(whole.out.in_features / len(inner_I))
            _fill(mlp.out, whole.out, hidden_D, inner_I, grown)
        hf.get_input_embeddings().weight.copy_(source.get_input_embeddings().weight[:, hidden_D])
        if not is_tied(hf):
            head = source.get_output_embeddings().weight
            hf.get_output_embeddings().weight.copy_(head[:, hidden_D])
        norms, whole_norms = ([*each.norms, each.last_norm] for each in (parts, wholes))
        for norm, whole in zip(norms, whole_norms, strict=True):
            norm.weight.copy_(whole.weight[hidden_D] * scale)
    hf.generation_config = target.hf.generation_config
    return target.rewrap(hf.eval())


class _Attention(NamedTuple):
    query: Any
    keys: tuple[Any, Any]  # and values
    out: Any
    size: int
    norms: tuple[Any, ...]

    @property
    def num_heads(self) -> int:
        return self.out.in_features // self.size


class _Mlp(NamedTuple):
    inputs: list[Any]
    out: Any


class _Parts(NamedTuple):
    """The parts that become smaller, in the same order for target and draft."""

    attentions: list[_Attention]
    mlps: list[_Mlp]
    norms: list[Any]
    last_norm: Any


def _parts(hf: Any) -> _Parts:
    attentions: list[_Attention] = []
    layers = hf.base_model.layers
    for layer in layers:
        own = layer.self_attn
        norms = [getattr(own, name, None) for name in ("q_norm", "k_norm")]
        kept = tuple(norm for norm in norms if norm is not None)
        keys = own.k_proj, own.v_proj
        attentions.append(_Attention(own.q_proj, keys, own.o_proj, own.head_dim, kept))
    return _Parts(
        attentions,
        [_Mlp([x.mlp.gate_proj, x.mlp.up_proj], x.mlp.down_proj) for x in layers],
        [norm for x in layers for norm in (x.input_layernorm, x.post_attention_layernorm)],
        hf.base_model.norm,
    )


def _narrowed(hf: Any, width: Width) -> Any:
    config = copy.deepcopy(hf.config)
    config.head_dim = hf.base_model.layers[0].self_attn.head_dim
    config.hidden_size, config.intermediate_size = width.hidden, width.inner
    config.num_attention_heads, config.num_key_value_heads = width.num_heads, width.num_key_heads
    return config


def _fill_attentions(
    parts: _Parts, wholes: _Parts, importance_LH: Tensor, width: Width, hidden_D: Tensor
) -> None:
    layers = zip(parts.attentions, wholes.attentions, importance_LH, strict=True)
    for new, old, importance_H in layers:
        old_keys = old.keys[0].out_features // old.size
        heads_H, keys_K = _best_heads(importance_H, old_keys, width)
        queries, keys = (_channels_of(heads, old.size) for heads in (heads_H, keys_K))
        _fill(new.query, old.query, queries, hidden_D)
        for part, whole in zip(new.keys, old.keys, strict=True):
            _fill(part, whole, keys, hidden_D)
        _fill(new.out, old.out, hidden_D, queries, math.sqrt(old.out.in_features / len(queries)))
        for norm, whole in zip(new.norms, old.norms, strict=True):
            norm.weight.copy_(whole.weight)


def _best_heads(importance_H: Tensor, num_keys: int, new: Width) -> tuple[Tensor, Tensor]:
    """The query and key heads to keep: the best groups, each with its best query heads."""
    groups_KG = importance_H.reshape(num_keys, -1)
    per_group = new.num_heads // new.num_key_heads
    best_KG = groups_KG.argsort(dim=-1, descending=True, stable=True)[:, :per_group].sort(-1).values
    keys_K = _best(groups_KG.gather(-1, best_KG).sum(-1), new.num_key_heads)
    heads_KG = best_KG[keys_K] + keys_K[:, None] * groups_KG.shape[1]
    return heads_KG.flatten(), keys_K


def _best(importance_P: Tensor, count: int) -> Tensor:
    """Indices of the most important parts, ascending."""
    return importance_P.argsort(descending=True, stable=True)[:count].sort().values


def _channels_of(heads: Tensor, size: int) -> Tensor:
    return (heads[:, None] * size + torch.arange(size)).flatten()


def _fill(new: Any, old: Any, rows: Tensor, columns: Tensor, scale: float = 1) -> None:
    """Copy these rows and columns of a linear layer, multiplied by `scale`."""
    new.weight.copy_(old.weight[rows][:, columns] * scale)
    if old.bias is not None:
        new.bias.copy_(old.bias[rows])


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


@contextlib.contextmanager
def _summed(parts: _Parts, sums: Importance) -> Generator[None]:
    """Within this context, what the model computes is added to the sums."""

    def add_hidden(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
        sums.hidden_D.add_(output.float().abs().flatten(0, -2).sum(0).cpu())

    with contextlib.ExitStack() as hooks:
        for norm in parts.norms:
            hooks.callback(norm.register_forward_hook(add_hidden).remove)
        outs = [part.out for part in (*parts.mlps, *parts.attentions)]
        for out, total_P in zip(outs, (*sums.inner_LI, *sums.heads_LH), strict=True):
            add = functools.partial(_add_norms, total_P)
            hooks.callback(out.register_forward_pre_hook(add).remove)
        yield


def _add_norms(total_P: Tensor, linear: Any, inputs: tuple[Tensor]) -> None:
    """Add the norms of what each part of a linear layer's input adds to its output."""
    weight = linear.weight.detach().float()
    size = linear.in_features // len(total_P)
    if size == 1:
        total_P += (inputs[0].float().flatten(0, -2).abs().sum(0) * weight.norm(dim=0)).cpu()
        return
    parts_NPS = inputs[0].float().reshape(-1, len(total_P), size)
    weight_PSD = weight.T.reshape(-1, size, weight.shape[0])
    added_NPD = torch.einsum("nps,psd->npd", parts_NPS, weight_PSD)
    total_P += added_NPD.norm(dim=-1).sum(0).cpu()
