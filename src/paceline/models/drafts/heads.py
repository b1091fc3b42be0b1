"""Heads of new encoder-decoders, which transformers 5 ties to the embeddings.

It ties them whatever the config says, but leaves them alone when it loads weights that differ.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


def new_like(hf: PreTrainedModel, config: PreTrainedConfig) -> PreTrainedModel:
    """A new model of the same kind, whose head is untied if that of `hf` is."""
    new = type(hf)(config)
    if not _is_tied(hf):
        untie_head(new)
    return new


def untie_head(hf: PreTrainedModel) -> None:
    """Give the model a head of its own, with the same weights."""
    if _is_tied(hf):
        head: Any = hf.get_output_embeddings()
        head.weight = nn.Parameter(head.weight.detach().clone())


def _is_tied(hf: PreTrainedModel) -> bool:
    head: Any = hf.get_output_embeddings()
    embeddings: Any = hf.get_input_embeddings()
    return head is not None and head.weight is embeddings.weight
