"""Sessions of decoder-only transformers models.

During a pass, cache rows are right-aligned: each row's newest token is in the last column, and the
columns left of shorter rows are masked. After a ragged rollback, rows are shifted to the right. So
distances between tokens of a row do not depend on other rows, as rotary, sliding-window and ALiBi
models need; learned positions are passed per row.

Shape suffixes: B batch, N new tokens, W cache width, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline.models.contract import ModelSession
from paceline.models.hf.base import evaluating
from paceline.models.hf.cache import RoomyCache

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.models.hf.base import HfModel


class CausalSession(ModelSession):
    """A session with a `RoomyCache`."""

    def __init__(self, model: HfModel) -> None:
        super().__init__(model.vocab_size, model.max_length)
        self.model = model
        self.cache = RoomyCache()
        self._device = model.device  # cached, because transformers iterates over weights to find it

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
        """Logits of the last `keep` columns (0: all); ends[b] is the new length of row b."""
        if self.cache.ends is not None:
            self.cache.realign(range(len(self.lengths)), self.cache.ends, max(self.lengths))
        tokens_BN = tokens_BN.to(self._device)
        with torch.inference_mode(), evaluating(self.model.hf):
            ends_B = None if min(ends) == max(ends) else torch.tensor(ends)
            logits_BNV = self.model.decoder(tokens_BN, self._pass_cache, ends_B, keep).float()
            if self.model.banned_K is not None:
                logits_BNV[..., self.model.banned_K] = -torch.inf
            return logits_BNV

    @property
    def _pass_cache(self) -> Any:
        """The cache that the forward pass gets."""
        return self.cache

    def _rollback(self, counts: Sequence[int]) -> None:
        ends = self.cache.ends_of(len(counts))
        self.cache.end_at([end - count for end, count in zip(ends, counts, strict=True)])

    def _refill(self, rows: Sequence[int], prompts: Sequence[Sequence[int]]) -> Tensor:
        fresh = self._fresh()
        logits_RV = fresh._prefill(prompts)
        self.cache.adopt(rows, fresh.cache, len(self.lengths))
        return logits_RV

    def _fresh(self) -> CausalSession:
        return CausalSession(self.model)

    def _keep_rows(self, rows: Sequence[int]) -> None:
        ends = self.cache.ends_of(len(self.lengths))
        # a pass needs a row whose first token is in the first column
        begins = any(ends[row] == self.lengths[row] for row in rows)
        if begins and list(rows) == sorted(set(rows)):
            self.cache.keep(rows, len(self.lengths))
        else:
            longest = max(self.lengths[row] for row in rows)
            self.cache.realign(rows, [ends[row] for row in rows], longest)
