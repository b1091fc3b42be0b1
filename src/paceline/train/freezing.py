"""Freezes embeddings or layers of a draft."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from paceline.errors import UsageError
from paceline.models.drafts.layers import layer_list

if TYPE_CHECKING:
    from paceline.models.hf.base import HfModel


_CONSTANT = "SinusoidalPositionalEmbedding"


def train_all(model: HfModel) -> None:
    """Train all weights but constants, such as the positions of Marian, and unused embeddings.

    An encoder-decoder without shared embeddings has a shared table that no pass reads. Processes
    that train together wait for the gradient of every weight that is trained.
    """
    model.hf.requires_grad_(True)
    for module in model.hf.modules():
        if type(module).__name__.endswith(_CONSTANT):
            module.requires_grad_(False)
    if model.decoder_prompt is None:
        return
    tables = [m.weight for m in model.hf.modules() if isinstance(m, nn.Embedding)]
    tables = [weight for weight in tables if weight.requires_grad]
    hidden = model.hidden(model.trial_batch([1]))
    gradients = torch.autograd.grad(hidden.sum(), tables, allow_unused=True)
    for weight, gradient in zip(tables, gradients, strict=True):
        if gradient is None and weight is not model.head_weight:
            weight.requires_grad_(False)


def freeze_embeddings(draft: HfModel) -> None:
    """Freeze the input embeddings and the output head."""
    for module in (draft.hf.get_input_embeddings(), draft.hf.get_output_embeddings()):
        if module is not None:
            module.requires_grad_(False)


def freeze_layers(draft: HfModel, count: int) -> None:
    """Freeze the first `count` layers, of the decoder if there is an encoder.

    Raises:
        UsageError: the draft has no further layer.
    """
    if count == 0:
        return
    _, layers = layer_list(draft.hf)
    if count >= len(layers):
        raise UsageError(
            f"freeze_layers is {count}, but the draft has {len(layers)} layers; "
            "leave at least one to train"
        )
    for layer in layers[:count]:
        layer.requires_grad_(False)
