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

    def log_probs(self, hidden_ND: Tensor, vocab_size: int | None = None) -> Tensor:
        """Log-softmax over the first `vocab_size` entries, float32. [N, D] -> [N, V]."""
        width = self.weight_VD.shape[0] if vocab_size is None else vocab_size
        bias = None if self.bias_V is None else self.bias_V[:width]
        weight = self.weight_VD[:width]
        return F.linear(hidden_ND.to(weight.dtype), weight, bias).float().log_softmax(-1)


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
    bias = head.bias_V
    weight = head.weight_VD
    options = (loss_of_chunk, chunk_size, vocab_size)
    return _ChunkedLoss.apply(hidden_ND, weight, bias, weights_N, options)  # pyright: ignore


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        weights_N: Tensor,
        options: tuple[ChunkLoss, int, int | None],
    ) -> Tensor:
        loss_of_chunk, chunk_size, vocab_size = options
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        weight = weight_VD.detach().requires_grad_(needs_weight)
        bias = None if bias_V is None else bias_V.detach().requires_grad_(needs_bias)
        grad_hidden = torch.zeros_like(hidden_ND) if needs_hidden else None
        total = hidden_ND.new_zeros((), dtype=torch.float32)
        with torch.enable_grad():
            for start in range(0, hidden_ND.shape[0], chunk_size):
                rows = slice(start, start + chunk_size)
                hidden = hidden_ND[rows].detach().requires_grad_(needs_hidden)
                log_probs = Head(weight, bias).log_probs(hidden, vocab_size)
                loss = (loss_of_chunk(log_probs, rows) * weights_N[rows]).sum()
                if loss.requires_grad:
                    # weight.grad and bias.grad add up over the chunks.
                    torch.autograd.backward(loss)
                if grad_hidden is not None and hidden.grad is not None:
                    grad_hidden[rows] = hidden.grad
                total += loss.detach()
        ctx.save_for_backward(grad_hidden, weight.grad, None if bias is None else bias.grad)
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        scale = grad_outputs[0]
        grads = [None if saved is None else saved * scale for saved in ctx.saved_tensors]
        return (*grads, None, None)
