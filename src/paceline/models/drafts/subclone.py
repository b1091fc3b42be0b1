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
import itertools
import math
from typing import TYPE_CHECKING, Any, NamedTuple, cast

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
    width, hf = width_of(model), cast("Any", model.hf)
    layers = hf.base_model.layers
    sums = Importance(
        torch.zeros(width.hidden),
        torch.zeros(len(layers), width.inner),
        torch.zeros(len(layers), width.num_heads),
    )
    num_read = 0
    for text in texts:
        if not len(text):
            continue
        new = text[: min(_LONGEST, model.max_length or _LONGEST)]
        with torch.inference_mode(), evaluating(model.hf), _summed(layers, sums):
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
    source: Any = target.hf
    _check(width, old, source.config, source.base_model.layers[0].self_attn.head_dim)
    hf: Any = new_like(source, _narrowed(source, width)).to(target.device)  # pyright: ignore
    for weight in hf.parameters():  # buffers, such as rope frequencies, keep their precision
        weight.data = weight.data.to(target.dtype)
    hidden_D = _best(importance.hidden_D, width.hidden)
    scale = math.sqrt(old.hidden / width.hidden)
    bodies = hf.base_model, source.base_model
    layers = zip(*(each.layers for each in bodies), *importance[1:], strict=True)
    with torch.no_grad():
        for new, whole, importance_I, importance_H in layers:
            _fill_attention(new.self_attn, whole.self_attn, importance_H, width, hidden_D)
            _fill_mlp(new.mlp, whole.mlp, importance_I, width, hidden_D)
        hf.get_input_embeddings().weight.copy_(source.get_input_embeddings().weight[:, hidden_D])
        if not is_tied(hf):
            head = source.get_output_embeddings().weight
            hf.get_output_embeddings().weight.copy_(head[:, hidden_D])
        for norm, whole in zip(*map(_norms, bodies), strict=True):
            norm.weight.copy_(whole.weight[hidden_D] * scale)
    hf.generation_config = target.hf.generation_config
    return target.rewrap(hf.eval())


def _norms(body: Any) -> list[Any]:
    """Norms of the residual stream, the last one at the end."""
    layers = [(each.input_layernorm, each.post_attention_layernorm) for each in body.layers]
    return [*itertools.chain(*layers), body.norm]


def _narrowed(hf: Any, width: Width) -> Any:
    config = copy.deepcopy(hf.config)
    config.head_dim = hf.base_model.layers[0].self_attn.head_dim
    config.hidden_size, config.intermediate_size = width.hidden, width.inner
    config.num_attention_heads, config.num_key_value_heads = width.num_heads, width.num_key_heads
    return config


def _fill_attention(
    new: Any, old: Any, importance_H: Tensor, width: Width, hidden_D: Tensor
) -> None:
    heads_H, keys_K = _best_heads(importance_H, old.k_proj.out_features // old.head_dim, width)
    queries, keys = (_channels_of(heads, old.head_dim) for heads in (heads_H, keys_K))
    _fill(new.q_proj, old.q_proj, queries, hidden_D)
    _fill(new.k_proj, old.k_proj, keys, hidden_D)
    _fill(new.v_proj, old.v_proj, keys, hidden_D)
    grown = math.sqrt(old.o_proj.in_features / len(queries))
    _fill(new.o_proj, old.o_proj, hidden_D, queries, grown)
    for name in ("q_norm", "k_norm"):
        if (norm := getattr(new, name, None)) is not None:
            norm.weight.copy_(getattr(old, name).weight)


def _fill_mlp(new: Any, old: Any, importance_I: Tensor, width: Width, hidden_D: Tensor) -> None:
    inner_I = _best(importance_I, width.inner)
    _fill(new.gate_proj, old.gate_proj, inner_I, hidden_D)
    _fill(new.up_proj, old.up_proj, inner_I, hidden_D)
    grown = math.sqrt(old.down_proj.in_features / len(inner_I))
    _fill(new.down_proj, old.down_proj, hidden_D, inner_I, grown)


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


def _check(width: Width, old: Width, config: Any, head_size: int) -> None:
    for name, new_size, old_size in zip(Width._fields, width, old, strict=True):
        if not 1 <= new_size <= old_size:
            raise UsageError(
                f"{name} of the draft is {new_size}; wanted 1 to the target's {old_size}"
            )
    most = old.num_heads // old.num_key_heads
    divides = width.hidden % width.num_heads == width.num_heads % width.num_key_heads == 0
    if not divides or width.num_heads > most * width.num_key_heads:
        raise UsageError(
            f"got {width.hidden} hidden channels, {width.num_heads} heads and "
            f"{width.num_key_heads} key heads; wanted multiples of each other, and as in the "
            f"target at most {most} heads per key head"
        )
    if getattr(config, "head_dim", None) is None and width.hidden != width.num_heads * head_size:
        raise UsageError(
            f"engines take hidden_size / num_heads for the size of a {config.model_type}'s head, "
            f"which is {head_size}; got {width.hidden} / {width.num_heads}: give hidden_size = "
            f"{head_size} x num_heads"
        )


@contextlib.contextmanager
def _summed(layers: Any, sums: Importance) -> Generator[None]:
    """Within this context, what the model computes is added to the sums."""

    def add_hidden(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
        sums.hidden_D.add_(output.float().abs().flatten(0, -2).sum(0).cpu())

    with contextlib.ExitStack() as hooks:
        for layer, inner_I, heads_H in zip(layers, *sums[1:], strict=True):
            for norm in (layer.input_layernorm, layer.post_attention_layernorm):
                hooks.callback(norm.register_forward_hook(add_hidden).remove)
            for out, total_P in ((layer.mlp.down_proj, inner_I), (layer.self_attn.o_proj, heads_H)):
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
