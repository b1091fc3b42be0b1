"""A draft without a model: it proposes what followed the same last tokens earlier in the text.

Engines call it n-gram or prompt lookup. It is free of cost and training, and the baseline of every
draft model: answers that repeat their prompt need no other.

Shape suffixes: B batch, R rows, N new tokens, T text, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from paceline.core.sampling import as_list
from paceline.decode.draft_policies import Confident
from paceline.models.contract import ModelSession, decoder_contexts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from paceline.models.contract import Model

NGRAM = "ngram"
"""The name of this draft."""
_SIZES = (3, 2, 1)


class NgramDraft:
    """A draft for a target, as `contract.Model`. Its q has one token, or all alike without a match.

    Attributes:
        policy: For `SpeculativeDecoder`: nothing is drafted without a match.
    """

    policy = Confident(0.5)
    num_parameters = 0
    mask_token = None

    def __init__(self, target: Model) -> None:
        self.tokenizer = target.tokenizer
        self.vocab_size = target.vocab_size
        self.max_length = target.max_length
        self.eos_token_ids = target.eos_token_ids
        self.decoder_prompt = target.decoder_prompt
        self.max_source_length = target.max_source_length
        self.source_vocab_size = target.source_vocab_size
        self.forced_eos = target.forced_eos

    def start_session(self) -> ModelSession:
        return _NgramSession(self)


class _NgramSession(ModelSession):
    """Texts of rows; that of an encoder-decoder has its source before it, to look tokens up in."""

    def __init__(self, draft: NgramDraft) -> None:
        super().__init__(draft.vocab_size, draft.max_length)
        self._draft = draft
        two = getattr(draft.tokenizer, "separate_vocabs", False)  # Marian's sources have others
        self._reads_source = not two and (draft.source_vocab_size or 0) <= draft.vocab_size
        self._rows: list[list[int]] = []

    def _lengths_after(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        return list(map(len, decoder_contexts(self._draft, prompts)))

    def _texts(self, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        start = self._draft.decoder_prompt
        if start is None:
            return list(map(list, prompts))
        return [[*(prompt if self._reads_source else ()), *start] for prompt in prompts]

    def _prefill(self, tokens: Sequence[Sequence[int]]) -> Tensor:
        self._rows = self._texts(tokens)
        return torch.stack(list(map(self._logits, self._rows)))

    def _extend(self, tokens_BN: Tensor) -> Tensor:
        self._rows = self._rows or [[] for _ in tokens_BN]
        logits: list[Tensor] = []
        for row, new in zip(self._rows, as_list(tokens_BN), strict=True):
            for token in new:
                row.append(token)
                logits.append(self._logits(row))
        return torch.stack(logits).view(*tokens_BN.shape, -1)

    def _logits(self, text: list[int]) -> Tensor:
        token = continuation(text)
        if token is None:
            return torch.zeros(self.vocab_size)
        return torch.full((self.vocab_size,), -torch.inf).index_fill(0, torch.tensor(token), 0.0)

    def _rollback(self, counts: Sequence[int]) -> None:
        self._rows = [row[: len(row) - n] for row, n in zip(self._rows, counts, strict=True)]

    def _refill(self, rows: Sequence[int], prompts: Sequence[Sequence[int]]) -> Tensor:
        texts = self._texts(prompts)
        for row, text in zip(rows, texts, strict=True):
            self._rows[row] = text
        return torch.stack(list(map(self._logits, texts)))

    def _keep_rows(self, rows: Sequence[int]) -> None:
        self._rows = [list(self._rows[row]) for row in rows]


def continuation(text: Sequence[int]) -> int | None:
    """The token that last followed the longest of the last 3, 2 or 1 tokens; None: none did."""
    tokens_T = torch.tensor(text)
    for size in _SIZES:
        if len(text) > size:
            before = tokens_T[:-1].unfold(0, size, 1)
            places = (before == tokens_T[-size:]).all(1).nonzero()
            if len(places):
                return text[int(places[-1]) + size]
    return None
