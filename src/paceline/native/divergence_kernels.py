"""Call divergences.c on logits; the gradients of the losses overwrite the draft's logits.

Shape suffixes: C tokens of a chunk, V vocabulary.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.native.checked import compiled, library
from paceline.native.structures import Losses, Term

if TYPE_CHECKING:
    from collections.abc import Sequence


def can_differentiate(logits: Tensor) -> bool:
    """True if the library is available and can read these logits."""
    known = logits.dtype in (torch.float32, torch.bfloat16)
    return known and logits.device.type == "cpu" and compiled() is not None


def losses_and_slopes(
    terms: Sequence[Term],
    target_logits_CV: Tensor | None,
    draft_logits_CV: Tensor,
    labels_C: Tensor,
    weights_C: Tensor,
    normalisers_C: Tensor | None = None,
) -> Tensor:
    """The weighted sum of the terms for each token, float32, [C].

    The draft's logits are overwritten with the gradients of the losses times `weights_C`.

    `normalisers_C`: if the logits are a subset of the target's, the log-sum-exp of all of them. TVD
    and negative log acceptance then use the target's probabilities over the whole vocabulary; other
    terms renormalise over the subset.
    """
    rows, vocab_size = draft_logits_CV.shape
    assert draft_logits_CV.is_contiguous(), "written in place"
    if target_logits_CV is not None:
        target_logits_CV = target_logits_CV.to(draft_logits_CV.dtype).contiguous()
        assert target_logits_CV.shape == draft_logits_CV.shape, "one vocabulary"
    labels_C = labels_C.contiguous()
    weights_C = weights_C.float().contiguous()
    if normalisers_C is not None:
        normalisers_C = normalisers_C.float().contiguous()
    losses_C = torch.empty(rows)
    array = (Term * len(terms))(*terms)
    losses = Losses(
        ctypes.addressof(array),
        len(terms),
        rows,
        vocab_size,
        draft_logits_CV.element_size(),
        None if target_logits_CV is None else target_logits_CV.data_ptr(),
        draft_logits_CV.data_ptr(),
        labels_C.data_ptr(),
        weights_C.data_ptr(),
        None if normalisers_C is None else normalisers_C.data_ptr(),
        losses_C.data_ptr(),
    )
    library().losses_and_slopes(ctypes.byref(losses), torch.get_num_threads())
    return losses_C
