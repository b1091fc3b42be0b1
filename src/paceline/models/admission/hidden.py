"""Compares the hidden states of a faster training pass with those of transformers.

Shape suffixes: T text, D hidden.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from paceline.errors import PacelineError
from paceline.models.admission.trial import FAULTS, Comparison, failed
from paceline.models.contract import pad
from paceline.models.hf.base import evaluating

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.models.hf.base import HfModel


def hidden_states_fault(model: HfModel, ready: HfModel, tolerance: float) -> str | None:
    """What is wrong with the hidden states of `ready`, in words; None if they are those of `model`.

    `tolerance` is in standard deviations.
    """
    found = Comparison()
    try:
        with evaluating(model.hf):
            found.add(_hidden_states(model, plain=True), _hidden_states(ready), "")
    except (torch.OutOfMemoryError, PacelineError):
        raise
    except FAULTS as error:
        return failed(error)
    if found.largest <= tolerance:
        return None
    return (
        f"gives hidden states that differ from transformers by {found.largest:.2g} standard "
        f"deviations (allowed {tolerance:g})"
    )


@torch.inference_mode()
def _hidden_states(model: HfModel, *, plain: bool = False) -> Tensor:
    """Of two encoder-decoder texts of two and one tokens, in one batch, [T, D]."""
    first, second, third = (token % model.vocab_size for token in (7, 11, 5))
    assert model.decoder_prompt is not None, "a decoder-only model has no sources"
    texts = pad([[*model.decoder_prompt, *new] for new in ([first, second], [third])])
    batch = texts._replace(source=pad([[first], [second, third, first]]))
    hidden_BTD = (model.plain_hidden if plain else model.hidden)(batch.to(model.device))
    kept_BT = torch.ones_like(batch.tokens_BT) if texts.attention_BT is None else texts.attention_BT
    return hidden_BTD[kept_BT.bool()].float()
