"""A divergence over part of the vocabulary: the head is the dearest matrix of a small draft.

Both models' distributions are taken over the most frequent tokens of the training text and a few of
the others, drawn afresh every step and each standing for as many as were left out: their logits are
raised by log(others / drawn), which makes the sum in the softmax's denominator right on average. The
target's head and the draft's are cut alike, so a draft equal to its target still has no loss.
"""

# V vocabulary, S subset
from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from pydantic import Field
from torch import Tensor

from paceline.config import StrictModel
from paceline.core.fused import Head

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class LossVocabulary(StrictModel):
    """How many of the most frequent tokens always count, and how many others are drawn a step."""

    frequent: int = Field(default=6144, ge=1)
    drawn: int = Field(default=1024, ge=1)


class VocabularySample:
    """The tokens of one step's divergence."""

    def __init__(self, config: LossVocabulary, counts_V: Tensor) -> None:
        by_count = counts_V.argsort(descending=True, stable=True)
        self.frequent_F = by_count[: config.frequent]
        self.others_O = by_count[config.frequent :]
        self.num_drawn = min(config.drawn, len(self.others_O))

    def draw(self, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        """Token numbers and what is added to their logits, [S] each."""
        picks = torch.randperm(len(self.others_O), generator=rng)[: self.num_drawn]
        tokens_S = torch.cat([self.frequent_F, self.others_O[picks]])
        offsets_S = torch.zeros(len(tokens_S))
        if self.num_drawn:
            offsets_S[len(self.frequent_F) :] = math.log(len(self.others_O) / self.num_drawn)
        return tokens_S, offsets_S


def cut_head(head: Head, tokens_S: Tensor, offsets_S: Tensor) -> Head:
    """The head's rows of these tokens, their logits raised by the offsets."""
    bias_S = offsets_S.to(head.weight_VD)
    if head.bias_V is not None:
        bias_S = bias_S + head.bias_V[tokens_S]
    return Head(head.weight_VD[tokens_S], bias_S)


def count_tokens(texts: Iterable[Sequence[int]], vocab_size: int) -> Tensor:
    """How often each token stands in the training text, [V]."""
    counts_V = torch.zeros(vocab_size, dtype=torch.int64)
    for text in texts:
        counts_V += torch.bincount(torch.tensor(text, dtype=torch.int64), minlength=vocab_size)
    return counts_V
