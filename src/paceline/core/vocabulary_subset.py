"""Convert logits between a subset of the vocabulary and the whole vocabulary.

Shape suffixes: K tokens of the subset, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

BANNED_LOGIT = -1e4
"""Logit of a token that a model may not emit, in training: probability 0 with a finite log."""


def spread(logits: Tensor, tokens_K: Tensor, vocab_size: int) -> Tensor:
    """Logits of the subset as logits of all tokens, -inf elsewhere. [..., K] -> [..., V]."""
    whole = logits.new_full((*logits.shape[:-1], vocab_size), -torch.inf)
    return whole.index_copy_(-1, tokens_K, logits)


def limited(logits: Tensor, tokens_K: Tensor) -> Tensor:
    """Logits of all tokens, set to -inf outside of the subset, [..., V]."""
    return spread(logits[..., tokens_K], tokens_K, logits.shape[-1])
