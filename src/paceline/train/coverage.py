"""Target scores for the loss of a draft with a restricted vocabulary.

A draft that proposes only tokens in K has the acceptance sum_K min(p, q), with p normalised over
the whole vocabulary. The loss receives the target's logits over K or a subset of K, and one number
per position, the target's log-sum-exp over all tokens. TVD, TVD++ and negative log acceptance use
both. KL(target || draft) would be infinite, because the draft's probability outside K is 0. KL and
JSD therefore use the target renormalised over K.
"""

# N positions, T of a row, C of a chunk, D hidden width, V compared tokens
from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from paceline.core.fused import chunks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.core.fused import Head
    from paceline.data.collate import Row


class TargetScores(NamedTuple):
    """The target's scores of the compared tokens."""

    hidden_ND: Tensor | None  # None if the objective uses labels only
    head: Head | None  # restricted to the compared tokens
    vocab_size: int | None  # number of valid rows of the head; None: all
    normalisers_N: Tensor | None  # log-sum-exp over all tokens; None if all are compared

    @torch.no_grad()
    def logits(self, rows: slice) -> Tensor | None:
        """Logits at these positions, [C, V]."""
        if self.hidden_ND is None:
            return None
        assert self.head is not None, "hidden states come from a target"
        return self.head.logits(self.hidden_ND[rows], self.vocab_size)

    def normalisers(self, rows: slice) -> Tensor | None:
        return None if self.normalisers_N is None else self.normalisers_N[rows]

    def log_probs(self, rows: slice) -> tuple[Tensor | None, Tensor | None]:
        """Log-probabilities over the compared tokens, [C, V], and their log total mass, [C]."""
        logits_CV = self.logits(rows)
        if logits_CV is None:
            return None, None
        logits_CV = logits_CV.float()
        normalisers_C = self.normalisers(rows)
        log_coverage_C = None if normalisers_C is None else logits_CV.logsumexp(-1) - normalisers_C
        return logits_CV.log_softmax(-1), log_coverage_C

    def served_log_probs(self, rows: slice) -> Tensor | None:
        """Log-probabilities normalised over the whole vocabulary, [C, V]."""
        log_probs_CV, log_coverage_C = self.log_probs(rows)
        if log_probs_CV is None or log_coverage_C is None:
            return log_probs_CV
        return log_probs_CV + log_coverage_C[:, None]


class Normalisers:
    """The target's log-sum-exp over its whole vocabulary, cached for cached hidden states."""

    def __init__(self, vocab_size: int, chunk_tokens: int) -> None:
        self._vocab_size = vocab_size
        self._chunk_tokens = chunk_tokens
        self._cache = WeakTensorKeyDictionary()

    @torch.no_grad()
    def of(
        self, rows: Sequence[Row], lengths: Sequence[int], hidden_ND: Tensor, head: Head
    ) -> Tensor:
        """Log-sum-exp at the hidden states of these rows, `lengths` per row. -> [N], float32.

        Cost: a product with the target's whole head for states that are not cached.
        """
        keys = [row.target_hidden_TD for row in rows]
        found = [None if key is None else self._cache.get(key) for key in keys]
        missing = [index for index, values_T in enumerate(found) if values_T is None]
        if missing:
            states = hidden_ND.split(list(lengths))
            values_N = self._compute(torch.cat([states[index] for index in missing]), head)
            parts = values_N.split([lengths[index] for index in missing])
            for index, part_T in zip(missing, parts, strict=True):
                found[index] = part_T
                key = keys[index]
                if key is not None:
                    self._cache[key] = part_T.clone()
        return torch.cat([part_T for part_T in found if part_T is not None])

    def _compute(self, hidden_ND: Tensor, head: Head) -> Tensor:
        parts = [
            head.logits(hidden_ND[part], self._vocab_size).float().logsumexp(-1)
            for part in chunks(len(hidden_ND), self._chunk_tokens)
        ]
        return torch.cat(parts)
