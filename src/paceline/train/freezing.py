"""Freezes embeddings or layers of a draft."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.errors import UsageError
from paceline.models.drafts.layers import layer_list

if TYPE_CHECKING:
    from paceline.models.hf.base import HfModel


_CONSTANT = "SinusoidalPositionalEmbedding"


def train_all(model: HfModel) -> None:
    """Train all weights but sinusoidal positions, which are constants (Marian, Pegasus)."""
    model.hf.requires_grad_(True)
    for module in model.hf.modules():
        if type(module).__name__.endswith(_CONSTANT):
            module.requires_grad_(False)


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
