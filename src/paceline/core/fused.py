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

    ChunkLoss = Callable[[Tensor, slice], Tensor]


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

    def to(self, dtype: torch.dtype) -> Head:
        """The head in this dtype."""
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

    def logits(self, hidden_ND: Tensor, vocab_size: int | None = None) -> Tensor:
        """The first `vocab_size` logits, in the weight's dtype. [N, D] -> [N, V]."""
        weight, bias, cap, offset = self.rows(slice(vocab_size))
        logits = self.capped(F.linear(hidden_ND.to(weight.dtype), weight, bias), cap)
        return logits if offset is None else logits + offset

    def slopes(self, logits_NV: Tensor) -> Tensor | None:
        """Derivative of the logits by the projection, [N, V]; None without a cap, where it is 1."""
        if self.cap is None:
            return None
        capped_NV = logits_NV if self.offset_V is None else logits_NV - self.offset_V
        return 1 - (capped_NV / self.cap).square()

    def log_probs(self, hidden_ND: Tensor, vocab_size: int | None = None) -> Tensor:
        """Log-softmax over the first `vocab_size` entries, float32. [N, D] -> [N, V]."""
        return self.logits(hidden_ND, vocab_size).float().log_softmax(-1)


_PART = 2048  # rows of the head that are cast at a time


class Needs(NamedTuple):
    """Which gradients to compute."""

    hidden: bool
    weight: bool
    bias: bool


class Gradients(NamedTuple):
    """A loss with its gradients."""

    loss: Tensor
    hidden_ND: Tensor | None
    weight_VD: Tensor | None
    bias_V: Tensor | None


def chunked_loss(
    hidden_ND: Tensor,
    head: Head,
    loss_of_chunk: ChunkLoss,
    weights_N: Tensor,
    *,
    chunk_size: int = 256,
    vocab_size: int | None = None,
) -> Tensor:
    """Weighted sum of token losses, a scalar; the forward pass computes the gradients, too.

    `loss_of_chunk(draft_log_probs_CV, rows)` returns the losses [C] of the tokens in the slice
    `rows`; it computes the target's side for these tokens only.

    Shapes: hidden [N, D], weights [N] -> scalar.
    Cost: one pass over the head per chunk forward and one backward; memory [chunk_size, V].
    """

    def compute(hidden_ND: Tensor, head: Head, needs: Needs) -> Gradients:
        weight, bias = head.weight_VD.requires_grad_(needs.weight), head.bias_V
        bias = None if bias is None else bias.requires_grad_(needs.bias)
        grad_ND = torch.zeros_like(hidden_ND) if needs.hidden else None
        total = hidden_ND.new_zeros((), dtype=torch.float32)
        with torch.enable_grad():
            for rows in chunks(len(hidden_ND), chunk_size):
                hidden = hidden_ND[rows].requires_grad_(needs.hidden)
                log_probs = head.log_probs(hidden, vocab_size)
                loss = (loss_of_chunk(log_probs, rows) * weights_N[rows]).sum()
                if loss.requires_grad:
                    torch.autograd.backward(loss)  # accumulates weight.grad and bias.grad
                if grad_ND is not None and hidden.grad is not None:
                    grad_ND[rows] = hidden.grad
                total += loss.detach()
        return Gradients(total, grad_ND, weight.grad, None if bias is None else bias.grad)

    return _ChunkedLoss.apply(hidden_ND, head.weight_VD, head.bias_V, head, compute)  # pyright: ignore


def chunked_loss_of_logits(
    hidden_ND: Tensor,
    head: Head,
    slopes_of_chunk: ChunkLoss,
    weights_N: Tensor,
    *,
    chunk_size: int = 256,
    vocab_size: int | None = None,
) -> Tensor:
    """`chunked_loss` for losses that compute their own gradients, without autograd.

    `slopes_of_chunk(draft_logits_CV, rows)` returns the losses [C] of the tokens in `rows` and
    overwrites the logits with the gradients of the weighted losses. Under autocast, logits and
    gradients have its dtype.
    """

    def compute(hidden_ND: Tensor, head: Head, needs: Needs) -> Gradients:
        kind = hidden_ND.device.type
        dtype = head.weight_VD.dtype
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
        grad_VD = torch.zeros_like(head.weight_VD) if needs.weight else None
        grad_V = torch.zeros_like(head.bias_V) if needs.bias and head.bias_V is not None else None
        grad_ND = torch.zeros_like(hidden_ND, dtype=torch.float32) if needs.hidden else None
        total = hidden_ND.new_zeros((), dtype=torch.float32)
        width = len(head.weight_VD[:vocab_size])
        with torch.autocast(kind, enabled=False):
            # One buffer for all chunks: allocating one per chunk fragments the heap.
            buffer_CV = hidden_ND.new_empty(min(chunk_size, len(hidden_ND)), width, dtype=dtype)
            for rows in chunks(len(hidden_ND), chunk_size):
                hidden_CD = hidden_ND[rows].to(dtype)
                logits_CV = buffer_CV[: len(hidden_CD)]
                for part in chunks(width, _PART):
                    logits_CV[:, part] = head.rows(part).to(dtype).logits(hidden_CD)
                slopes_CV = head.rows(slice(vocab_size)).slopes(logits_CV)
                total += (slopes_of_chunk(logits_CV, rows) * weights_N[rows]).sum()
                if slopes_CV is not None:
                    logits_CV *= slopes_CV
                for part in chunks(width, _PART):
                    grad_CP = logits_CV[:, part]
                    if grad_ND is not None:
                        grad_ND[rows] += grad_CP @ head.weight_VD[part].to(dtype)
                    if grad_VD is not None:
                        grad_VD[part] += grad_CP.T @ hidden_CD
                if grad_V is not None:
                    grad_V[:width] += logits_CV.sum(0, dtype=torch.float32)
        grad_ND = None if grad_ND is None else grad_ND.to(hidden_ND.dtype)
        return Gradients(total, grad_ND, grad_VD, grad_V)

    return _ChunkedLoss.apply(hidden_ND, head.weight_VD, head.bias_V, head, compute)  # pyright: ignore


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
        head: Head,
        compute: Callable[[Tensor, Head, Needs], Gradients],
    ) -> Tensor:
        bias_V = None if bias_V is None else bias_V.detach()
        head = head._replace(weight_VD=weight_VD.detach(), bias_V=bias_V)
        found = compute(hidden_ND.detach(), head, Needs(*ctx.needs_input_grad[:3]))
        ctx.gradients = found[1:]  # not save_for_backward: backward may return them without a copy
        return found.loss

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        scale = grad_outputs[0]
        gradients, ctx.gradients = ctx.gradients, None
        if scale.device.type == "cpu" and scale == 1:  # on the CPU this forces no sync
            return (*gradients, None, None)
        return (*(None if each is None else each * scale for each in gradients), None, None)
