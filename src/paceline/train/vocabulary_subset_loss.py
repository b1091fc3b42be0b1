"""A divergence over part of the vocabulary: the head is the dearest matrix of a small draft.

Both models' distributions are taken over the most frequent tokens of the training text and a few of
the others, drawn afresh every step and each standing for as many as were left out: their logits are
raised by log(others / drawn), which makes the sum in the softmax's denominator right on average. The
target's head and the draft's are cut alike, so a draft equal to its target still has no loss.
"""

# V vocabulary, S subset
from __future__ import annotations

import math

import torch
from pydantic import Field
from torch import Tensor

from paceline.config import StrictModel


class LossVocabulary(StrictModel):
    """How many of the most frequent tokens always count, and how many others are drawn a step."""

    frequent: int = Field(default=6144, ge=1)
    drawn: int = Field(default=1024, ge=1)


class VocabularySample:
    """The tokens of one step's divergence."""

    def __init__(self, config: LossVocabulary, ranking: Tensor) -> None:
        """`ranking`: the tokens that count, the most frequent first."""
        self.frequent_F = ranking[: config.frequent]
        self.others_O = ranking[config.frequent :]
        self.num_drawn = min(config.drawn, len(self.others_O))

    def draw(self, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        """Token numbers and what is added to their logits, [S] each."""
        picks = torch.randperm(len(self.others_O), generator=rng)[: self.num_drawn]
        tokens_S = torch.cat([self.frequent_F, self.others_O[picks]])
        offsets_S = torch.zeros(len(tokens_S))
        if self.num_drawn:
            offsets_S[len(self.frequent_F) :] = math.log(len(self.others_O) / self.num_drawn)
        return tokens_S, offsets_S


def places_of(labels_N: Tensor, tokens_S: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Where labels stand among these tokens, and whether they do; of the others any place. [N] each."""
    places_V = torch.full((vocab_size,), -1, device=labels_N.device)
    places_V[tokens_S.to(labels_N.device)] = torch.arange(len(tokens_S), device=labels_N.device)
    places_N = places_V[labels_N]
    return places_N.clamp(min=0), places_N >= 0
