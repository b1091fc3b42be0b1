"""Logits over a subset of the vocabulary, as logits over all of it.

Shape suffixes: K tokens of the subset, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor


def spread(logits: Tensor, tokens_K: Tensor, vocab_size: int) -> Tensor:
    """Logits over the subset as logits over all tokens; the others get -inf. [..., K] -> [..., V]."""
    whole = logits.new_full((*logits.shape[:-1], vocab_size), -torch.inf)
    return whole.index_copy_(-1, tokens_K, logits)


def limited(logits: Tensor, tokens_K: Tensor) -> Tensor:
    """Logits over all tokens with -inf outside of the subset, [..., V]."""
    return spread(logits[..., tokens_K], tokens_K, logits.shape[-1])
