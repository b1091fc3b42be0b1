"""The pairs of models that the statistical tests decode with, and the one test procedure.

Five tokens; target and draft overlap by about 0.5 on average, so that a few thousand texts hold
every kind of block many times over.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING

import torch

import exact
from paceline.core.sampling import SamplingParams
from paceline.models.fakes import TableModel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.decode.decoder import Decoder

VOCABULARY = 5
PROMPT = [3, 1]
ODDS = 1e-4


def table(order: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(VOCABULARY**order, VOCABULARY, generator=generator, dtype=torch.float64)
    return (1.2 * logits).softmax(-1)


class Pair:
    """A target and a draft, as models and as functions in Python floats.

    `draft_shaping`: how the draft draws, but for the penalty (the target's); None: as the target.
    """

    def __init__(
        self,
        order: int,
        shaping: exact.Shaping | None = None,
        draft_shaping: exact.Shaping | None = None,
    ) -> None:
        self.order = order
        self.shaping = shaping or exact.Shaping()
        self._draft_shaping = draft_shaping
        penalty = self.shaping.repetition_penalty
        drawn = replace(draft_shaping or self.shaping, repetition_penalty=penalty)
        tables = table(order, seed=1), table(order, seed=2)
        self.target, self.draft = (TableModel(values) for values in tables)
        raw = exact.Shaping(repetition_penalty=penalty)
        self.p_raw = exact.from_table(tables[0].tolist(), order, raw)
        self.p, self.q = (
            exact.from_table(values.tolist(), order, shaped)
            for values, shaped in zip(tables, (self.shaping, drawn), strict=True)
        )

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams.model_validate(asdict(self.shaping))

    @property
    def draft_sampling(self) -> SamplingParams | None:
        if self._draft_shaping is None:
            return None
        return SamplingParams.model_validate(asdict(self._draft_shaping))

    def plain(self, gamma: int) -> dict[tuple[int, ...], float]:
        """What a text of `length(gamma)` tokens follows where nothing is lost."""
        return exact.plain_texts(self.p, tuple(PROMPT), length(gamma))

    def speculative(self, rule: exact.RuleVectors, gamma: int) -> dict[tuple[int, ...], float]:
        """What it follows under a rule; at temperature 0 the rule's are those of `exact` there."""
        texts = partial(exact.speculative_texts, self.p, self.q, rule, gamma=gamma)
        p_raw = self.p_raw if self.shaping.temperature == 0 else None
        return texts(prompt=tuple(PROMPT), length=length(gamma), p_raw=p_raw)


def length(gamma: int) -> int:
    """Room for the prompt pass's own token and, behind it, a block all accepted with its bonus."""
    return max(4, gamma + 2)


def draw(decoder: Decoder, gamma: int, count: int, first_seed: int = 0) -> list[list[int]]:
    """Many texts, each from a seed of its own, in one batch."""
    found = decoder.generate([PROMPT] * count, length(gamma), seed=first_seed)
    return [generation.tokens for generation in found]


def smallest_p_value(
    texts: Sequence[Sequence[int]], expected: dict[tuple[int, ...], float]
) -> float:
    """Of all pairs of neighbouring places in the texts."""
    return min(exact.pair_p_values(texts, expected))
