"""Attention over a cache whose rows have lengths of their own, and its mask, for transformers.

Once registered, a model uses it if `_attn_implementation` of its configuration is `NAME`. The mask
comes from transformers, which tells full, sliding and chunked attention apart.

Shape suffixes: B batch, N new tokens, W columns, H query heads, K key heads, D head size.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

NAME = "paceline_fixed"

_FEW_TOKENS = 16  # the scores of more tokens need too much memory


def mask_of(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Tensor,
    mask_function: Callable[..., Tensor],
    dtype: torch.dtype,
    device: torch.device,
    **_unused: Any,
) -> Tensor:
    """Additive mask [B, 1, N, W]; row b begins at column q_offset[b], [B, 1].

    The lowest finite number stands for hidden columns, so that rows of the buffer that hold no text
    stay finite.
    """
    queries_BN = torch.arange(q_length, device=device)[None] + q_offset
    rows_B = torch.arange(batch_size, device=device)
    columns_W = torch.arange(kv_length, device=device)
    heads = torch.zeros(1, 1, 1, 1, dtype=torch.int64, device=device)
    seen = mask_function(
        rows_B[:, None, None, None], heads, queries_BN[:, None, :, None], columns_W
    )
    shown = torch.zeros((), dtype=dtype, device=device)
    mask = torch.where(seen, shown, torch.finfo(dtype).min)
    torch._dynamo.maybe_mark_dynamic(mask, 3)  # as the buffers, whose columns it masks
    return mask


def attend(
    _module: object,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_unused: Any,
) -> tuple[Tensor, None]:
    """Attention of query [B, H, N, D] over key and value [B, K, W, D] -> [B, N, H, D].

    `softcap` bounds the scores; `s_aux` are attention sinks, one per head.
    """
    batch, heads, count, size = query.shape
    scale = size**-0.5 if scaling is None else scaling
    if count > _FEW_TOKENS and softcap is None and s_aux is None:
        mixed = F.scaled_dot_product_attention(
            query, key, value, attention_mask, scale=scale, enable_gqa=heads > key.shape[1]
        )
        return mixed.transpose(1, 2).contiguous(), None
    # scale first, because the scores may overflow 16 bits
    grouped = (query.float() * scale).to(key.dtype).reshape(batch, key.shape[1], -1, size)
    scores = torch.matmul(grouped, key.transpose(2, 3)).float().view(batch, heads, count, -1)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores + attention_mask
    if s_aux is not None:
        sinks = s_aux.float().view(1, -1, 1, 1).expand(batch, -1, count, 1)
        shares = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    else:
        shares = scores.softmax(-1)
    shares = shares.to(value.dtype).view(batch, key.shape[1], -1, shares.shape[-1])
    mixed = torch.matmul(shares, value).view(batch, heads, count, value.shape[-1])
    return mixed.transpose(1, 2).contiguous(), None


@functools.cache
def register() -> None:
    """Make both known to transformers."""
    # imported here, because they import torch._dynamo, which takes a second
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, mask_of)
