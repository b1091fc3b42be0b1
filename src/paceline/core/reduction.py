"""The only mean over losses: by sequence (the paper's) or by token.

Both take the count to divide by from outside when an optimiser step is made of several batches or
processes, since the mean of means is another number.
"""

# B batch, T tokens
from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Mean = Literal["sequence", "token"]


def count_units(mask_BT: Tensor, mean: Mean) -> Tensor:
    """How many tokens, or sequences with at least one token, the mask keeps. -> scalar."""
    if mean == "token":
        return mask_BT.sum()
    return mask_BT.any(-1).sum()


def token_weights(mask_BT: Tensor, *, mean: Mean, total: Tensor | float | None = None) -> Tensor:
    """What each token's loss is multiplied with, so that a plain sum is the mean. -> [B, T].

    mean="sequence": mean over each sequence's tokens, then over sequences; "token": over all
    tokens. `total` is `count_units` of the whole optimiser step; None: of this batch alone.

    Raises:
        ValueError: every position is masked.
    Paper: Zhou et al. 2023, Eq. 2 (sequence). Differs: the token mean is ours, an option.
    """
    units = count_units(mask_BT, mean) if total is None else total
    if units == 0:
        raise ValueError("no completion token to train on: every position is masked")
    mask = mask_BT.float()
    if mean == "token":
        return mask / units
    lengths = mask.sum(-1, keepdim=True).clamp(min=1)
    return mask / lengths / units


def reduce_loss(
    loss_BT: Tensor, mask_BT: Tensor, *, mean: Mean, total: Tensor | float | None = None
) -> Tensor:
    """Mean of the kept losses, a scalar in the unit of `loss_BT`.

    Masked values never count, not even where they are infinite or NaN.
    """
    weights = token_weights(mask_BT, mean=mean, total=total)
    return (torch.where(mask_BT.bool(), loss_BT, 0.0) * weights).sum()
