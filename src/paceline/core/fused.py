"""Compute LM head and loss in chunks of tokens, without the logits of the whole batch in memory.

The forward pass also computes the gradients of the hidden states and of a trained head, chunk by
chunk, and frees each chunk's logits. Equal to the plain loss up to the order of float32 sums.
"""

# N tokens, C tokens of a chunk, D hidden width, V vocabulary
from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

    ChunkLoss = Callable[[Tensor, slice], tuple[Tensor, Tensor]]


class Head(NamedTuple):
    """The LM head: logits = cap * tanh((hidden @ weight^T + bias) / cap) + offset.

    Attributes:
        weight_VD: Weight of the projection.
        bias_V: Bias of the projection, or None.
        cap: Bound of the projection's absolute values; None: they are not bounded.
        offset_V: What `raised` adds behind the cap; without a cap, it is part of the bias.
    """

    weight_VD: Tensor
    bias_V: Tensor | None = None
    cap: float | None = None
    offset_V: Tensor | None = None

    def rows(self, tokens: Tensor | slice) -> Head:
        """The head restricted to these tokens."""
        bias = None if self.bias_V is None else self.bias_V[tokens]
        offset = None if self.offset_V is None else self.offset_V[tokens]
        return Head(self.weight_VD[tokens], bias, self.cap, offset)

    def raised(self, offset_V: Tensor) -> Head:
        """The head with logits that are higher by these numbers."""
        name = "bias_V" if self.cap is None else "offset_V"
        old_V, offset_V = getattr(self, name), offset_V.to(self.weight_VD)
        return self._replace(**{name: offset_V if old_V is None else old_V + offset_V})

    def detached(self) -> Head:
        bias = None if self.bias_V is None else self.bias_V.detach()
        return self._replace(weight_VD=self.weight_VD.detach(), bias_V=bias)

    def to(self, dtype: torch.dtype) -> Head:
        tensors = (self.weight_VD, self.bias_V, self.offset_V)
        weight, bias, offset = (None if each is None else each.to(dtype) for each in tensors)
        return self._replace(weight_VD=weight, bias_V=bias, offset_V=offset)

    @staticmethod
    def capped(values: Tensor, cap: float | None) -> Tensor:
        """cap * tanh(values / cap); computed in float32, since 16 bits are coarse near the cap."""
        if cap is None:
            return values
        return (
            cap * torch.tanh(values.to(torch.promote_types(values.dtype, torch.float32)) / cap)
        ).to(values.dtype)

    def projected(self, hidden_ND: Tensor) -> Tensor:
        """The projection, without cap and offset, in the weight's dtype. [N, D] -> [N, V]."""
        return F.linear(hidden_ND.to(self.weight_VD.dtype), self.weight_VD, self.bias_V)

    def logits_of(self, projected_NV: Tensor) -> Tensor:
        """The logits of a projection: with cap and offset. [N, V] -> [N, V]."""
        logits_NV = self.capped(projected_NV, self.cap)
        return logits_NV if self.offset_V is None else logits_NV + self.offset_V

    def logits(self, hidden_ND: Tensor, vocab_size: int | None = None) -> Tensor:
        """The first `vocab_size` logits, in the weight's dtype. [N, D] -> [N, V]."""
        head = self.rows(slice(vocab_size))
        return head.logits_of(head.projected(hidden_ND))

    def slopes(self, logits_NV: Tensor) -> Tensor | None:
        """Derivative of the logits by the projection, [N, V]; None without a cap, where it is 1."""
        if self.cap is None:
            return None
        capped_NV = logits_NV if self.offset_V is None else logits_NV - self.offset_V
        return 1 - (capped_NV / self.cap).square()

    def log_probs(self, hidden_ND: Tensor, vocab_size: int | None = None) -> Tensor:
        """Log-softmax over the first `vocab_size` entries, float32. [N, D] -> [N, V]."""
        return self.logits(hidden_ND, vocab_size).float().log_softmax(-1)


def chunked_loss(
    hidden_ND: Tensor,
    head: Head,
    loss_of_chunk: ChunkLoss,
    weights_N: Tensor,
    *,
    chunk_size: int = 256,
    vocab_size: int | None = None,
    part_size: int | None = None,
) -> Tensor:
    """Weighted sum of token losses, a scalar; the forward pass computes the gradients, too.

    `loss_of_chunk(hidden_CD, rows)` returns the losses [C] of the tokens in the slice `rows`, and
    the gradient of their weighted sum by the head's projection, [C, V]. Under autocast, hidden
    states and gradient have its dtype.

    `vocab_size`: number of the head's rows that have logits; None: all. `part_size`: number of rows
    whose gradients are computed at a time, and added in float32; None: all, as autograd does it.

    Shapes: hidden [N, D], weights [N] -> scalar.
    Cost: a product with the head per chunk, and two for the gradients; memory [chunk_size, V].
    """
    sizes = chunk_size, vocab_size, part_size
    return _ChunkedLoss.apply(hidden_ND, *head[:2], loss_of_chunk, weights_N, sizes)  # pyright: ignore


def chunks(count: int, size: int) -> list[slice]:
    """Consecutive slices of `size` entries; the last one may be shorter."""
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        loss_of_chunk: ChunkLoss,
        weights_N: Tensor,
        sizes: tuple[int, int | None, int | None],
    ) -> Tensor:
        chunk_size, vocab_size, part_size = sizes
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        kind, dtype = hidden_ND.device.type, weight_VD.dtype
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
        wide = torch.promote_types(hidden_ND.dtype, torch.float32)
        grad_ND = torch.zeros_like(hidden_ND, dtype=wide) if needs_hidden else None
        grad_VD = torch.zeros_like(weight_VD) if needs_weight else None
        grad_V = torch.zeros_like(bias_V) if needs_bias and bias_V is not None else None
        total = hidden_ND.new_zeros((), dtype=torch.float32)
        width = len(weight_VD[:vocab_size])
        parts = chunks(width, part_size or width)
        sum_dtype = dtype if part_size is None else torch.float32
        for rows in chunks(len(hidden_ND), chunk_size):
            hidden_CD = hidden_ND[rows].to(dtype)
            losses_C, slopes_CV = loss_of_chunk(hidden_CD, rows)
            total += (losses_C * weights_N[rows]).sum()
            for part in parts:
                slopes_CP = slopes_CV[:, part]
                if grad_ND is not None:
                    grad_ND[rows] += slopes_CP @ weight_VD[part].to(dtype)
                if grad_VD is not None:
                    grad_VD[part] += slopes_CP.T @ hidden_CD
            if grad_V is not None:
                grad_V[:width] += slopes_CV.sum(0, dtype=sum_dtype)
        grad_ND = None if grad_ND is None else grad_ND.to(hidden_ND.dtype)
        # not save_for_backward: backward may return them without a copy
        ctx.gradients = grad_ND, grad_VD, grad_V
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        scale = grad_outputs[0]
        gradients, ctx.gradients = ctx.gradients, None
        if scale.device.type != "cpu" or scale != 1:  # the value is read only where it is no sync
            gradients = [None if each is None else each * scale for each in gradients]
        return (*gradients, None, None, None)
