"""Samples a part of the vocabulary for divergences, since the head is most of a small draft's cost.

Each step uses the most frequent tokens of the training text and a random sample of the others. The
logits of the sample are raised by log(others / drawn), so that the softmax denominator is unbiased.
Both models use the same tokens, so a draft equal to its target has a loss of 0.
"""

# V vocabulary, S subset
from __future__ import annotations

import math

import torch
from pydantic import Field
from torch import Tensor

from paceline.config import StrictModel


class LossVocabulary(StrictModel):
    """Number of most frequent tokens in every step, and of other tokens drawn per step."""

    frequent: int = Field(default=6144, ge=1)
    drawn: int = Field(default=1024, ge=1)


class VocabularySample:
    """Draws the tokens of each step."""

    def __init__(self, config: LossVocabulary, ranking: Tensor) -> None:
        """`ranking` has all tokens to draw from, most frequent first."""
        self.frequent_F = ranking[: config.frequent]
        self.others_O = ranking[config.frequent :]
        self.num_drawn = min(config.drawn, len(self.others_O))

    def draw(self, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        """Token ids and offsets of their logits, [S] each."""
        picks = torch.randperm(len(self.others_O), generator=rng)[: self.num_drawn]
        tokens_S = torch.cat([self.frequent_F, self.others_O[picks]])
        offsets_S = torch.zeros(len(tokens_S))
        if self.num_drawn:
            offsets_S[len(self.frequent_F) :] = math.log(len(self.others_O) / self.num_drawn)
        return tokens_S, offsets_S


def places_of(labels_N: Tensor, tokens_S: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Indices of labels among these tokens, and whether they are among them; else 0. [N] each."""
    places_V = torch.full((vocab_size,), -1, device=labels_N.device)
    places_V[tokens_S.to(labels_N.device)] = torch.arange(len(tokens_S), device=labels_N.device)
    places_N = places_V[labels_N]
    return places_N.clamp(min=0), places_N >= 0
