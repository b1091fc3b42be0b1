"""Masks and positions of right-aligned cache rows that differ in length.

Shape suffixes: B batch, N new tokens, W cache width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def mask_and_positions(ends_B: Tensor, tokens_BN: Tensor) -> dict[str, Tensor]:
    """`attention_mask` over the cache, [B, W], and `position_ids` of the new tokens, [B, N].

    `ends_B` are the lengths of the rows, new tokens included.
    """
    count, device = tokens_BN.shape[1], tokens_BN.device
    width = int(ends_B.max())
    mask_BW = torch.arange(width) >= (width - ends_B)[:, None]
    positions_BN = (ends_B[:, None] - count + torch.arange(count)).clamp(min=0)
    return {
        "attention_mask": mask_BW.to(device, torch.int64),
        "position_ids": positions_BN.to(device),
    }
