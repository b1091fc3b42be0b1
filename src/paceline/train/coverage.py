"""How much of the target a draft of few tokens is held against.

A draft that proposes the tokens K alone is served with an acceptance of sum_K min(p, q), p the target
over its whole vocabulary. The loss sees the target's logits over K, or over some of K; what they lack
of the whole is one number a position, the target's log-sum-exp over all tokens. TVD, TVD++ and
negative log acceptance are taken with it. A KL from the target is infinite where the draft proposes
nothing, so KL and JSD are taken to the target renormalised over K.
"""

# N positions, T of a row, C of a chunk, D hidden width, V tokens that are compared
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
    """What the target says of each position, over the tokens that are compared.

    Attributes:
        hidden_ND: Its hidden states; None where labels are all it takes.
        head: Its head over these tokens, of whose rows the first `vocab_size` count.
        normalisers_N: Its log-sum-exp over all tokens, where these are some; None where they are all.
    """

    hidden_ND: Tensor | None
    head: Head | None
    vocab_size: int | None
    normalisers_N: Tensor | None

    @torch.no_grad()
    def logits(self, rows: slice) -> Tensor | None:
        """At these positions, [C, V]."""
        if self.hidden_ND is None:
            return None
        assert self.head is not None, "hidden states are a target's"
        return self.head.logits(self.hidden_ND[rows], self.vocab_size)

    def normalisers(self, rows: slice) -> Tensor | None:
        return None if self.normalisers_N is None else self.normalisers_N[rows]

    def log_probs(self, rows: slice) -> tuple[Tensor | None, Tensor | None]:
        """Normalised over these tokens, [C, V], and the log of the target's mass on them, [C]."""
        logits_CV = self.logits(rows)
        if logits_CV is None:
            return None, None
        logits_CV = logits_CV.float()
        whole_C = self.normalisers(rows)
        log_coverage_C = None if whole_C is None else logits_CV.logsumexp(-1) - whole_C
        return logits_CV.log_softmax(-1), log_coverage_C

    def served_log_probs(self, rows: slice) -> Tensor | None:
        """Normalised over the whole vocabulary, [C, V]."""
        log_probs_CV, log_coverage_C = self.log_probs(rows)
        if log_probs_CV is None or log_coverage_C is None:
            return log_probs_CV
        return log_probs_CV + log_coverage_C[:, None]


class Normalisers:
    """The target's log-sum-exp over its whole vocabulary, once for states that come up again."""

    def __init__(self, vocab_size: int, chunk_tokens: int) -> None:
        self._vocab_size = vocab_size
        self._chunk_tokens = chunk_tokens
        self._known = WeakTensorKeyDictionary()

    @torch.no_grad()
    def of(
        self, rows: Sequence[Row], lengths: Sequence[int], hidden_ND: Tensor, head: Head
    ) -> Tensor:
        """At these states of the rows, `lengths` of each. -> [N], float32.

        Cost: a pass over the target's whole head for states that are new.
        """
        found: list[Tensor | None] = [self._recall(row) for row in rows]
        missing = [index for index, known in enumerate(found) if known is None]
        if missing:
            states = hidden_ND.split(list(lengths))
            values_N = self._measure(torch.cat([states[index] for index in missing]), head)
            parts = values_N.split([lengths[index] for index in missing])
            for index, part_T in zip(missing, parts, strict=True):
                found[index] = part_T
                self._keep(rows[index], part_T)
        return torch.cat([part_T for part_T in found if part_T is not None])

    def _measure(self, hidden_ND: Tensor, head: Head) -> Tensor:
        parts = [
            head.logits(hidden_ND[part], self._vocab_size).float().logsumexp(-1)
            for part in chunks(len(hidden_ND), self._chunk_tokens)
        ]
        return torch.cat(parts)

    def _recall(self, row: Row) -> Tensor | None:
        states_TD = row.target_hidden_TD
        return None if states_TD is None else self._known.get(states_TD)

    def _keep(self, row: Row, values_T: Tensor) -> None:
        if row.target_hidden_TD is not None:
            self._known[row.target_hidden_TD] = values_T.clone()
