"""Mean of token losses, by sequence or by token.

An optimizer step over several batches or processes passes the total count, because a mean of
batch means differs from the mean of the step.
"""

# B batch, T tokens
from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Mean = Literal["sequence", "token"]


def count_units(mask_BT: Tensor, mean: Mean) -> Tensor:
    """Number of unmasked tokens, or of sequences with at least one. -> scalar."""
    if mean == "token":
        return mask_BT.sum()
    return mask_BT.any(-1).sum()


def token_weights(mask_BT: Tensor, *, mean: Mean, total: Tensor | float | None = None) -> Tensor:
    """Weights of the token losses, so that the weighted sum is the mean. -> [B, T].

    mean="sequence": mean over each sequence's tokens, then over sequences; "token": over all
    tokens. `total` is `count_units` of the whole optimizer step; None: of this batch only.

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
    """Mean of the unmasked losses, a scalar; masked values may be infinite or NaN."""
    weights = token_weights(mask_BT, mean=mean, total=total)
    return (torch.where(mask_BT.bool(), loss_BT, 0.0) * weights).sum()
