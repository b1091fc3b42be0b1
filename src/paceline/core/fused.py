"""Head and loss in chunks of tokens: [tokens, vocabulary] of a whole batch never exists.

The gradient with respect to the hidden states (and the head, if it is trained) is computed in the
forward pass, chunk by chunk, so a chunk's logits are dropped before the next chunk's are made.
Equal to the plain loss up to the order of float32 sums.
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
    """The output projection: weight [V, D], bias [V] or None."""

    weight_VD: Tensor
    bias_V: Tensor | None = None

    def rows(self, tokens_S: Tensor, offsets_S: Tensor | None = None) -> Head:
        """The head of these tokens alone, their logits raised by the offsets."""
        bias_S = None if self.bias_V is None else self.bias_V[tokens_S]
        if offsets_S is not None:
            offsets_S = offsets_S.to(self.weight_VD)
            bias_S = offsets_S if bias_S is None else bias_S + offsets_S
        return Head(self.weight_VD[tokens_S], bias_S)

    def logits(self, hidden_ND: Tensor, vocab_size: int | None = None) -> Tensor:
        """The first `vocab_size` entries, as precise as the weight. [N, D] -> [N, V]."""
        width = self.weight_VD.shape[0] if vocab_size is None else vocab_size
        bias = None if self.bias_V is None else self.bias_V[:width]
        weight = self.weight_VD[:width]
        return F.linear(hidden_ND.to(weight.dtype), weight, bias)

    def part(self, tokens: slice, dtype: torch.dtype) -> Head:
        """The head of these tokens alone, in this precision."""
        bias = None if self.bias_V is None else self.bias_V[tokens].to(dtype)
        return Head(self.weight_VD[tokens].to(dtype), bias)

    def log_probs(self, hidden_ND: Tensor, vocab_size: int | None = None) -> Tensor:
        """Log-softmax over the first `vocab_size` entries, float32. [N, D] -> [N, V]."""
        return self.logits(hidden_ND, vocab_size).float().log_softmax(-1)


_PART = 2048  # tokens of the head that are cast, and whose slopes are made, at a time


class Needs(NamedTuple):
    """Which gradients are wanted."""

    hidden: bool
    weight: bool
    bias: bool


class Slopes(NamedTuple):
    """A loss, and how it rises with the hidden states, the head's weight and its bias."""

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
    """Sum over tokens of weight times loss, a scalar whose gradient is already known.

    `loss_of_chunk(draft_log_probs_CV, rows)` gives the loss [C] of the tokens `rows` (a slice of
    the N tokens); what it needs of the target it computes for these rows alone.

    Shapes: hidden [N, D], weights [N] -> scalar.
    Cost: one pass over the head per chunk forward and one backward; memory [chunk_size, V].
    """

    def slopes(hidden_ND: Tensor, head: Head, needs: Needs) -> Slopes:
        weight = head.weight_VD.requires_grad_(needs.weight)
        bias = None if head.bias_V is None else head.bias_V.requires_grad_(needs.bias)
        grad_ND = torch.zeros_like(hidden_ND) if needs.hidden else None
        total = hidden_ND.new_zeros((), dtype=torch.float32)
        with torch.enable_grad():
            for rows in chunks(len(hidden_ND), chunk_size):
                hidden = hidden_ND[rows].requires_grad_(needs.hidden)
                log_probs = Head(weight, bias).log_probs(hidden, vocab_size)
                loss = (loss_of_chunk(log_probs, rows) * weights_N[rows]).sum()
                if loss.requires_grad:
                    # weight.grad and bias.grad add up over the chunks.
                    torch.autograd.backward(loss)
                if grad_ND is not None and hidden.grad is not None:
                    grad_ND[rows] = hidden.grad
                total += loss.detach()
        return Slopes(total, grad_ND, weight.grad, None if bias is None else bias.grad)

    return _ChunkedLoss.apply(hidden_ND, *head, slopes)  # pyright: ignore


def chunked_loss_of_logits(
    hidden_ND: Tensor,
    head: Head,
    slopes_of_chunk: ChunkLoss,
    weights_N: Tensor,
    *,
    chunk_size: int = 256,
    vocab_size: int | None = None,
) -> Tensor:
    """The same for losses that know their own slopes, without autograd.

    `slopes_of_chunk(draft_logits_CV, rows)` gives the loss [C] of the tokens `rows` and leaves in the
    place of the logits what their losses times their weights rise by. Under autocast logits and
    slopes are of its type.
    """

    def slopes(hidden_ND: Tensor, head: Head, needs: Needs) -> Slopes:
        kind = hidden_ND.device.type
        exact = head.weight_VD.dtype
        if torch.is_autocast_enabled(kind):
            exact = torch.get_autocast_dtype(kind)
        whole_VD = torch.zeros_like(head.weight_VD) if needs.weight else None
        whole_V = torch.zeros_like(head.bias_V) if needs.bias and head.bias_V is not None else None
        grad_ND = torch.zeros_like(hidden_ND, dtype=torch.float32) if needs.hidden else None
        total = hidden_ND.new_zeros((), dtype=torch.float32)
        width = len(head.weight_VD[:vocab_size])
        with torch.autocast(kind, enabled=False):
            # one room for all chunks: made and given back each time, it leaves holes in the heap
            room_CV = hidden_ND.new_empty(min(chunk_size, len(hidden_ND)), width, dtype=exact)
            for rows in chunks(len(hidden_ND), chunk_size):
                hidden_CD = hidden_ND[rows].to(exact)
                logits_CV = room_CV[: len(hidden_CD)]
                for part in chunks(width, _PART):
                    logits_CV[:, part] = head.part(part, exact).logits(hidden_CD)
                total += (slopes_of_chunk(logits_CV, rows) * weights_N[rows]).sum()
                for part in chunks(width, _PART):
                    slopes_CP = logits_CV[:, part]
                    if grad_ND is not None:
                        grad_ND[rows] += slopes_CP @ head.weight_VD[part].to(exact)
                    if whole_VD is not None:
                        whole_VD[part] += slopes_CP.T @ hidden_CD
                if whole_V is not None:
                    whole_V[:width] += logits_CV.sum(0, dtype=torch.float32)
        grad_ND = None if grad_ND is None else grad_ND.to(hidden_ND.dtype)
        return Slopes(total, grad_ND, whole_VD, whole_V)

    return _ChunkedLoss.apply(hidden_ND, *head, slopes)  # pyright: ignore


def chunks(count: int, size: int) -> list[slice]:
    """Consecutive slices of `size`, the last one perhaps shorter."""
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        slopes: Callable[[Tensor, Head, Needs], Slopes],
    ) -> Tensor:
        head = Head(weight_VD.detach(), None if bias_V is None else bias_V.detach())
        found = slopes(hidden_ND.detach(), head, Needs(*ctx.needs_input_grad[:3]))
        ctx.slopes = found[1:]  # not saved as others are: they can be handed on without a copy
        return found.loss

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        scale = grad_outputs[0]
        slopes, ctx.slopes = ctx.slopes, None
        if scale.device.type == "cpu" and scale == 1:  # there asking costs nothing
            return (*slopes, None)
        return (*(None if slope is None else slope * scale for slope in slopes), None)
