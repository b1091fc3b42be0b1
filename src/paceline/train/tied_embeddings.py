"""Adds the gradient of tied embeddings in place, row by row.

Autograd would allocate a full matrix for the embeddings' gradient and another for its sum with the
head's gradient, although a batch uses only a few rows.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.models.hf.base import HfModel


@contextlib.contextmanager
def rows_added_in_place(model: HfModel) -> Iterator[None]:
    """Within this context, forward passes add tied embeddings' gradients directly to `weight.grad`.

    For a single process only, because data parallelism synchronises gradients from autograd.
    Embeddings with further functions, such as padding, are not changed.
    """
    embedding: Any = model.hf.get_input_embeddings()
    head: Any = model.hf.get_output_embeddings()
    tied = head is not None and head.weight is embedding.weight and embedding.weight.requires_grad
    plain = type(embedding) is nn.Embedding and embedding.padding_idx is None
    if not tied or not plain or embedding.scale_grad_by_freq:
        yield
        return
    handle = embedding.register_forward_hook(_detach_output)
    try:
        yield
    finally:
        handle.remove()


def _detach_output(embedding: nn.Embedding, inputs: tuple[Tensor], output: Tensor) -> Tensor | None:
    if not output.requires_grad:
        return None
    tokens_BT = inputs[0]
    rows_BTD = output.detach().requires_grad_()

    def add(grad_BTD: Tensor) -> None:
        weight = embedding.weight
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        weight.grad.index_add_(0, tokens_BT.flatten(), grad_BTD.flatten(0, 1).to(weight.dtype))

    rows_BTD.register_hook(add)
    return rows_BTD
