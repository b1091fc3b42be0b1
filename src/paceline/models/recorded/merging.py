"""One product of several linear layers with one input."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Product = Callable[[Tensor], Tensor]


def merged_product(layers: Sequence[Any]) -> Product:
    """One product of several layers, in their dtype; shares the weights."""
    weight, bias = _merged(layers), _stacked_bias(layers)
    return lambda x: F.linear(x.to(weight.dtype), weight, bias)


def _merged(layers: Sequence[Any]) -> Tensor:
    """The concatenated weights; the layers' weights become views of the result."""
    if (merged := _already_merged([layer.weight for layer in layers])) is not None:
        return merged
    weight = torch.cat([layer.weight.detach() for layer in layers])
    parts = weight.split([len(layer.weight) for layer in layers])
    for layer, part in zip(layers, parts, strict=True):
        layer.weight.data = part
    return weight


def _already_merged(weights: Sequence[Tensor]) -> Tensor | None:
    """The tensor of which these weights are consecutive views, or None."""
    first = weights[0]
    end = first.data_ptr()
    for weight in weights:
        if weight.data_ptr() != end or not weight.is_contiguous() or weight.dtype != first.dtype:
            return None
        end += weight.numel() * weight.itemsize
    if first.untyped_storage().data_ptr() + first.untyped_storage().nbytes() < end:
        return None  # separate tensors that happen to be adjacent
    rows = sum(len(weight) for weight in weights)
    return first.detach().as_strided((rows, first.shape[1]), first.stride(), first.storage_offset())


def _stacked_bias(layers: Sequence[Any]) -> Tensor | None:
    if all(layer.bias is None for layer in layers):
        return None
    biases = [x.weight.new_zeros(len(x.weight)) if x.bias is None else x.bias for x in layers]
    return torch.cat([bias.detach() for bias in biases])
