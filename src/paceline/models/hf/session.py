"""Texts that a decoder-only transformers model has read.

The cache keeps every row right-aligned: the newest token of each row sits in the last column, and
columns to the left of a shorter row are masked. Rolling rows back by different counts moves each
row's keys and values to the right. Distances between tokens of a row then never depend on the other
rows, so rotary, sliding-window and ALiBi models stay right; learned positions are given per row.

Shape suffixes: B batch, N new tokens, W cache width, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.models.contract import ModelSession
from paceline.models.hf.base import evaluating
from paceline.models.hf.cache import RoomyCache

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.models.hf.base import HfModel


class CausalSession(ModelSession):
    """Keys and values of a batch of texts, right-aligned."""

    def __init__(self, model: HfModel) -> None:
        super().__init__(model.vocab_size, model.max_length)
        self.model = model
        self.cache = RoomyCache()
        self._device = model.device  # asked once: transformers looks through all weights for it

    def _prefill(self, tokens: Sequence[Sequence[int]]) -> Tensor:
        lengths = [len(row) for row in tokens]
        width = max(lengths)
        tokens_BW = torch.zeros(len(tokens), width, dtype=torch.int64)
        for row, new in enumerate(tokens):
            tokens_BW[row, width - len(new) :] = torch.tensor(new)
        return self._read(tokens_BW, lengths, keep=1)[:, 0]

    def _extend(self, tokens_BN: Tensor) -> Tensor:
        count = tokens_BN.shape[1]
        return self._read(tokens_BN, [length + count for length in self.lengths], keep=0)

    def _read(self, tokens_BN: Tensor, ends: Sequence[int], *, keep: int) -> Tensor:
        """Logits of the last `keep` columns (0: all); row b is ends[b] tokens long afterwards."""
        self._align()
        tokens_BN = tokens_BN.to(self._device)
        with torch.inference_mode(), evaluating(self.model.hf):
            return self.model.decoder(tokens_BN, self.cache, _ragged(ends), keep).float()

    def _rollback(self, counts: Sequence[int]) -> None:
        self.cache.forget(counts)

    def _refill(self, rows: Sequence[int], prompts: Sequence[Sequence[int]]) -> Tensor:
        fresh = self._fresh()
        logits_RV = fresh._prefill(prompts)
        self.cache.adopt(rows, fresh.cache, len(self.lengths))
        return logits_RV

    def _fresh(self) -> CausalSession:
        """An empty session that reads as this one does."""
        return CausalSession(self.model)

    def _keep_rows(self, rows: Sequence[int]) -> None:
        ends = self.cache.ends_of(len(self.lengths))
        # torch wants the first column in use: some row must begin there
        begins = any(ends[row] == self.lengths[row] for row in rows)
        if begins and list(rows) == sorted(set(rows)):
            self.cache.keep(rows, len(self.lengths))
        else:
            longest = max(self.lengths[row] for row in rows)
            self.cache.realign(rows, [ends[row] for row in rows], longest)

    def _align(self) -> None:
        """Let all rows end at one column, as torch reads them."""
        if self.cache.ends is not None:
            rows = range(len(self.lengths))
            self.cache.realign(rows, self.cache.ends, max(self.lengths))


def _ragged(ends: Sequence[int]) -> Tensor | None:
    """The ends of rows of different lengths, [B]."""
    return None if min(ends) == max(ends) else torch.tensor(ends)
