"""The gradient of an embedding that is the output head, too.

Autograd makes the embedding's part a matrix as large as the head's, then a third one for their sum.
Here the few rows that a batch has are added to the gradient where it is.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.models.hf.causal import CausalModel


@contextlib.contextmanager
def rows_added_in_place(model: CausalModel) -> Iterator[None]:
    """The model's passes in here leave their part of a tied embedding's gradient straight in `weight.grad`.

    Only for one process: data parallelism hears of a gradient from autograd alone. Embeddings that do
    more than look up rows are left as they are.
    """
    embedding: Any = model.hf.get_input_embeddings()
    head: Any = model.hf.get_output_embeddings()
    tied = head is not None and head.weight is embedding.weight and embedding.weight.requires_grad
    if not (tied and _only_looks_up(embedding)):
        yield
        return
    handle = embedding.register_forward_hook(_leave_rows)
    try:
        yield
    finally:
        handle.remove()


def _only_looks_up(embedding: nn.Module) -> bool:
    if type(embedding) is not nn.Embedding:
        return False
    return embedding.padding_idx is None and not embedding.scale_grad_by_freq


def _leave_rows(embedding: nn.Embedding, inputs: tuple[Tensor], output: Tensor) -> Tensor | None:
    if not output.requires_grad:
        return None
    tokens_BT = inputs[0]
    rows_BTD = output.detach().requires_grad_()

    def add(slopes_BTD: Tensor) -> None:
        weight = embedding.weight
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        weight.grad.index_add_(0, tokens_BT.flatten(), slopes_BTD.flatten(0, 1).to(weight.dtype))

    rows_BTD.register_hook(add)
    return rows_BTD
