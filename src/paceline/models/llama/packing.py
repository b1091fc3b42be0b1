"""16-bit weights for processors without 16-bit arithmetic.

Reading one token is bound by memory: every weight is fetched once and used once. Halving the weights
halves the time. FBGEMM multiplies float32 activations by float16 weights and sums in float32, so for
a checkpoint that is stored in 16 bits nothing is lost; many tokens at once are as fast as in float32.
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

# largest change of a weight, relative to the largest weight of its matrix
EXACT = 2.0**-16  # float16 holds the matrix but for weights too small to matter
ROUNDED = 2.0**-11  # float16 rounds the matrix; anything beyond is overflow

# a product of rows x weights beyond this is worth waking the other threads for
_SHARED_WORK = 1 << 19


def half_precision_change(weight: Tensor) -> float:
    """How far float16 moves a weight, at most, relative to the largest; infinite on overflow."""
    largest = float(weight.abs().max())
    change = float((weight.half().float() - weight).abs().max())
    return change / largest if largest else 0.0


class Packer:
    """Turns linear layers into products with float16 weights, where that changes them little enough.

    Attributes:
        num_packed: Products packed so far; the others stay in float32.
        largest_change: Of the packed ones, see `half_precision_change`.
    """

    def __init__(self, tolerance: float) -> None:
        self.tolerance = tolerance
        self.num_packed = 0
        self.largest_change = 0.0

    def __call__(self, layers: Sequence[nn.Module]) -> Product:
        """One product that gives the outputs of all these layers, concatenated."""
        weight, bias = _stacked(layers).float(), _stacked_bias(layers)
        change = half_precision_change(weight)
        if change > self.tolerance:
            return lambda x: F.linear(x, weight, bias)
        self.num_packed += 1
        self.largest_change = max(self.largest_change, change)
        if weight.numel() >= _SHARED_WORK or not _has_serial_kernel():
            return _parallel(weight, bias)
        # Packed a second time by the first batch that is large enough, if there ever is one.
        shared = functools.cache(lambda: _parallel(_stacked(layers).float(), bias))
        alone = _serial(weight, bias)
        enough = _SHARED_WORK / len(weight)
        return lambda x: alone(x) if x.numel() < enough else shared()(x)


def bfloat16_product(layers: Sequence[nn.Module]) -> Product:
    """Products that round what comes to bfloat16, as this processor multiplies it; float32 comes out.

    Layers in bfloat16 share the weight.
    """
    weight, bias = _merged(layers).bfloat16(), _stacked_bias(layers)

    def product(x: Tensor) -> Tensor:
        y = F.linear(x.bfloat16(), weight).float()
        return y if bias is None else y + bias

    return product


def merged_product(layers: Sequence[nn.Module]) -> Product:
    """One product for layers side by side, in their own precision; they share the weight."""
    weight, bias = _merged(layers), _stacked_bias(layers)
    bias = None if bias is None else bias.to(weight.dtype)
    return lambda x: F.linear(x.to(weight.dtype), weight, bias)


def _merged(layers: Sequence[Any]) -> Tensor:
    """The weights of layers one behind the other; the layers' own are parts of it from then on."""
    if len(layers) == 1:
        return layers[0].weight.detach()
    weight = _stacked(layers)
    parts = weight.split([len(layer.weight) for layer in layers])
    for layer, part in zip(layers, parts, strict=True):
        layer.weight.data = part
    return weight


class PackedLinear(nn.Module):
    """Stands where a linear layer stood, and still shows its weight to code that asks for it."""

    def __init__(self, layer: nn.Module, product: Product) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias
        self.product = product

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x)


def packed_copy(hf: PreTrainedModel, packer: Packer) -> PreTrainedModel:
    """The model with its linear layers packed; everything else is shared with the original."""
    shared = {id(tensor): tensor for tensor in (*hf.parameters(), *hf.buffers())}
    layers = [module for module in hf.modules() if isinstance(module, nn.Linear | Conv1D)]
    packed = {id(layer): PackedLinear(layer, packer([layer])) for layer in layers}
    return copy.deepcopy(hf, {**shared, **packed})  # pyright: ignore[reportArgumentType]


def _stacked(layers: Sequence[nn.Module]) -> Tensor:
    return torch.cat([_weight(layer) for layer in layers]).detach()


def _weight(layer: Any) -> Tensor:
    """[out, in]; GPT-2 keeps it the other way round."""
    return layer.weight.t() if isinstance(layer, Conv1D) else layer.weight


def _stacked_bias(layers: Sequence[Any]) -> Tensor | None:
    """Float32; None if no layer has one."""
    if all(layer.bias is None for layer in layers):
        return None
    biases = [x.weight.new_zeros(len(_weight(x))) if x.bias is None else x.bias for x in layers]
    return torch.cat([bias.detach().float() for bias in biases])


@functools.cache
def can_pack() -> bool:
    """Is FBGEMM there (x86 only)?"""
    return "fbgemm" in torch.backends.quantized.supported_engines


def _parallel(weight: Tensor, bias: Tensor | None) -> Product:
    packed = torch.ops.quantized.linear_prepack_fp16(weight, bias)
    multiply = torch.ops.quantized.linear_dynamic_fp16.default
    return lambda x: multiply(x, packed)


def _serial(weight: Tensor, bias: Tensor | None) -> Product:
    """One thread and a sixth of the overhead of a call, which counts for small matrices."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated
        packed = torch.fbgemm_pack_gemm_matrix_fp16(weight)
    bias = torch.zeros(len(weight)) if bias is None else bias
    multiply = torch.fbgemm_linear_fp16_weight
    return lambda x: multiply(x, packed, bias)


@functools.cache
def _has_serial_kernel() -> bool:
    """Deprecated in torch 2.13 with no date; tried once here, where its warning goes nowhere."""
    if not hasattr(torch, "fbgemm_linear_fp16_weight"):
        return False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        packed = torch.fbgemm_pack_gemm_matrix_fp16(torch.zeros(8, 8))
        torch.fbgemm_linear_fp16_weight(torch.zeros(1, 8), packed, torch.zeros(8))
    return True
