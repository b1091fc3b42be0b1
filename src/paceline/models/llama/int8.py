"""8-bit weights for drafts: half the memory traffic of 16 bits; errors cost speed, not exactness.

Each matrix row has a scale, its largest absolute weight / 127, rounded up. The rounded copy holds
exactly the weights of the 8-bit pass, so measurements on it also hold for the 8-bit pass.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from paceline.models.hf.architectures import untie_head

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LARGEST = 127


def round_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize to int8 in [-127, 127] with one scale per row: weight = numbers * scales.

    [R, D] -> [R, D], [R]. Scales have four significant bits, so float16 represents the products.
    """
    largest_R = weight.detach().float().abs().amax(-1)
    mantissa_R, exponent_R = torch.frexp(largest_R / LARGEST)
    scales_R = torch.ldexp((16 * mantissa_R).ceil() / 16, exponent_R)
    scales_R = torch.where(largest_R > 0, scales_R, 1.0)
    numbers = (weight.detach().float() / scales_R[:, None]).round().clamp(-LARGEST, LARGEST)
    return numbers.to(torch.int8), scales_R


@torch.no_grad()
def rounded_copy(hf: PreTrainedModel) -> PreTrainedModel:
    """A float32 copy of the model whose linear layers are rounded; embeddings are not rounded."""
    rounded = copy.deepcopy(hf).float()
    untie_head(rounded)
    rounded.config.tie_word_embeddings = False
    for layer in rounded.modules():
        if isinstance(layer, nn.Linear):
            numbers, scales = round_rows(layer.weight)
            layer.weight.copy_(numbers * scales[:, None])
    return rounded
