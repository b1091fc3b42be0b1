"""16-bit weights for processors without 16-bit arithmetic.

A pass over one token is memory-bound, so half the weight bytes take half the time. FBGEMM
multiplies float32 activations by float16 weights and accumulates in float32: 16-bit checkpoints
lose nothing, and passes over many tokens are as fast as in float32.
"""

from __future__ import annotations

import copy
import functools
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from transformers import PreTrainedModel

    Product = Callable[[Tensor], Tensor]

# maximum change of a weight, relative to the largest weight of its matrix
EXACT = 2.0**-16  # float16 is exact, except for negligibly small weights
ROUNDED = 2.0**-11  # float16 rounds; a larger change is an overflow

_SHARED_WORK = 1 << 19  # rows x weights above which a product uses several threads


def half_precision_change(weight: Tensor) -> float:
    """Maximum rounding error in float16, relative to the largest weight; infinite on overflow."""
    largest = float(weight.abs().max())
    change = float((weight.half().float() - weight).abs().max())
    return change / largest if largest else 0.0


class Packer:
    """Converts linear layers to products with float16 weights, if the error is within a tolerance.

    Attributes:
        num_packed: Products packed so far; the others stay in float32.
        largest_change: Maximum `half_precision_change` of the packed products.
    """

    def __init__(self, tolerance: float) -> None:
        self.tolerance = tolerance
        self.num_packed = 0
        self.largest_change = 0.0

    def __call__(self, layers: Sequence[nn.Module]) -> Product:
        weight, bias = _stacked(layers).float(), _stacked_bias(layers)
        change = half_precision_change(weight)
        if change > self.tolerance:
            return lambda x: F.linear(x, weight, bias)
        self.num_packed += 1
        self.largest_change = max(self.largest_change, change)
        if weight.numel() >= _SHARED_WORK or not _has_serial_kernel():
            return _parallel(weight, bias)
        # The first large batch packs the weights again for the parallel kernel.
        parallel = functools.cache(lambda: _parallel(_stacked(layers).float(), bias))
        serial = _serial(weight, bias)
        threshold = _SHARED_WORK / len(weight)
        return lambda x: serial(x) if x.numel() < threshold else parallel()(x)


def bfloat16_product(layers: Sequence[nn.Module]) -> Product:
    """One product that rounds inputs to bfloat16 and returns float32; shares bfloat16 weights."""
    weight, bias = _merged(layers).bfloat16(), _stacked_bias(layers)

    def product(x: Tensor) -> Tensor:
        y = F.linear(x.bfloat16(), weight).float()
        return y if bias is None else y + bias

    return product


def merged_product(layers: Sequence[nn.Module]) -> Product:
    """One product of several layers, in their dtype; shares the weights."""
    weight, bias = _merged(layers), _stacked_bias(layers)
    bias = None if bias is None else bias.to(weight.dtype)
    return lambda x: F.linear(x.to(weight.dtype), weight, bias)


def _merged(layers: Sequence[Any]) -> Tensor:
    """The concatenated weights; the layers' weights become views of the result."""
    if len(layers) == 1:
        return layers[0].weight.detach()
    if (merged := _already_merged([layer.weight for layer in layers])) is not None:
        return merged
    weight = _stacked(layers)
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


class PackedLinear(nn.Module):
    def __init__(self, layer: nn.Module, product: Product) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias
        self.product = product

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x)


def packed_copy(hf: PreTrainedModel, packer: Packer) -> PreTrainedModel:
    """A copy of the model with packed linear layers; it shares all other tensors."""
    shared = {id(tensor): tensor for tensor in (*hf.parameters(), *hf.buffers())}
    layers = [module for module in hf.modules() if isinstance(module, nn.Linear | Conv1D)]
    packed = {id(layer): PackedLinear(layer, packer([layer])) for layer in layers}
    return copy.deepcopy(hf, {**shared, **packed})  # pyright: ignore[reportArgumentType]


def _stacked(layers: Sequence[nn.Module]) -> Tensor:
    return torch.cat([_weight(layer) for layer in layers]).detach()


def _weight(layer: Any) -> Tensor:
    # [out, in]; GPT-2 stores the transpose
    return layer.weight.t() if isinstance(layer, Conv1D) else layer.weight


def _stacked_bias(layers: Sequence[Any]) -> Tensor | None:
    if all(layer.bias is None for layer in layers):
        return None
    biases = [x.weight.new_zeros(len(_weight(x))) if x.bias is None else x.bias for x in layers]
    return torch.cat([bias.detach().float() for bias in biases])


@functools.cache
def can_pack() -> bool:
    """True if FBGEMM is available (x86 only)."""
    return "fbgemm" in torch.backends.quantized.supported_engines


def _parallel(weight: Tensor, bias: Tensor | None) -> Product:
    packed = torch.ops.quantized.linear_prepack_fp16(weight, bias)
    multiply = torch.ops.quantized.linear_dynamic_fp16.default
    return lambda x: multiply(x, packed)


def _serial(weight: Tensor, bias: Tensor | None) -> Product:
    """Single-threaded, with a sixth of the overhead per call, for small matrices."""
    packed = torch.fbgemm_pack_gemm_matrix_fp16(weight)
    bias = torch.zeros(len(weight)) if bias is None else bias
    multiply = torch.fbgemm_linear_fp16_weight
    return lambda x: multiply(x, packed, bias)


@functools.cache
def _has_serial_kernel() -> bool:
    # deprecated since torch 2.13; the trial calls also consume the warnings, which come once
    if not hasattr(torch, "fbgemm_linear_fp16_weight"):
        return False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        packed = torch.fbgemm_pack_gemm_matrix_fp16(torch.zeros(8, 8))
        torch.fbgemm_linear_fp16_weight(torch.zeros(1, 8), packed, torch.zeros(8))
    return True
