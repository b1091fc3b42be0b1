"""8-bit weights for a draft: half the bytes a pass, and its mistakes cost speed, never exactness.

Every row of a matrix has a scale, its largest weight / 127 or a little more. The rounded copy holds the very weights
that the 8-bit pass reads, so what is measured on it is what is served.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LARGEST = 127


def round_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Whole numbers in [-127, 127] and a scale a row: weight = numbers * scales. [R, D] -> [R, D], [R]."""
    largest_R = weight.detach().float().abs().amax(-1)
    # A scale of four significant bits: times seven bits of number, float16 still holds the product.
    mantissa_R, exponent_R = torch.frexp(largest_R / LARGEST)
    scales_R = torch.ldexp((16 * mantissa_R).ceil() / 16, exponent_R)
    scales_R = torch.where(largest_R > 0, scales_R, 1.0)
    numbers = (weight.detach().float() / scales_R[:, None]).round().clamp(-LARGEST, LARGEST)
    return numbers.to(torch.int8), scales_R


@torch.no_grad()
def rounded_copy(hf: PreTrainedModel) -> PreTrainedModel:
    """The model in float32 with every linear layer rounded so; embeddings stay as they are."""
    rounded = copy.deepcopy(hf).float()
    head: Any = rounded.get_output_embeddings()
    if head.weight is rounded.get_input_embeddings().weight:
        rounded.config.tie_word_embeddings = False
        head.weight = nn.Parameter(head.weight.clone(), requires_grad=head.weight.requires_grad)
    for layer in rounded.modules():
        if isinstance(layer, nn.Linear):
            numbers, scales = round_rows(layer.weight)
            layer.weight.copy_(numbers * scales[:, None])
    return rounded
