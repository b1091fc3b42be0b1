"""Distributions over a target's most likely tokens and the rest, from recorded log-probabilities.

A served target gives the log-probabilities of its K most likely tokens. Their complement is one
more outcome, the tail. Divergences between the coarse distributions of target and draft need no
other value of the target. They are at most the divergences over all tokens (data processing), and
equal to them if the K tokens are the whole vocabulary.

A draft with a vocabulary of its own is compared over its tokens. Tokens outside of it that were
not recorded count as its tail, so KL and JSD may then exceed those over all tokens; TVD and the
negative log acceptance do not.
"""

# C positions, K recorded tokens, V vocabulary
from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

UNUSED, OUTSIDE = -1, -2
_SMALLEST = 1e-12  # probability of a tail that rounding made negative


class TopScores(NamedTuple):
    """A target's most likely tokens at N positions, and their log-probabilities in nats.

    Unused entries have the token `UNUSED`. A position without tokens was not recorded.
    """

    tokens_NK: Tensor
    log_probs_NK: Tensor

    @classmethod
    def of(cls, tokens: Sequence[Sequence[int]], log_probs: Sequence[Sequence[float]]) -> TopScores:
        """Those of each position, which may have different numbers of them."""
        width = max(map(len, tokens), default=0)
        ids = [[*row, *[UNUSED] * (width - len(row))] for row in tokens]
        logs = [[*row, *[0.0] * (width - len(row))] for row in log_probs]
        shape = len(ids), width
        return cls(
            torch.tensor(ids, dtype=torch.int32).view(shape),
            torch.tensor(logs, dtype=torch.float32).view(shape),
        )

    def recorded(self) -> Tensor:
        """True at positions with scores, [N]."""
        return (self.tokens_NK != UNUSED).any(-1)

    def rows(self, positions: slice) -> TopScores:
        return TopScores(*(values[positions] for values in self))

    def to(self, device: torch.device) -> TopScores:
        return TopScores(*(values.to(device) for values in self))


def among(top: TopScores, tokens_S: Tensor, vocab_size: int) -> TopScores:
    """The scores with indices among the tokens of a draft's vocabulary instead of tokens.

    Recorded tokens that the draft does not propose get the index `OUTSIDE`.
    """
    places_V = torch.full((vocab_size,), OUTSIDE, device=top.tokens_NK.device)
    places_V[tokens_S.to(places_V.device)] = torch.arange(len(tokens_S), device=places_V.device)
    places_NK = places_V[top.tokens_NK.clamp(min=0)]
    return TopScores(torch.where(top.tokens_NK < 0, UNUSED, places_NK), top.log_probs_NK)


def log_coverage(top: TopScores) -> Tensor:
    """Log of the target's mass on all but the recorded tokens outside, [C, K] -> [C].

    What was not recorded counts as proposed by the draft.
    """
    outside_CK = top.tokens_NK == OUTSIDE
    mass_C = torch.where(outside_CK, top.log_probs_NK.double().exp(), 0.0).sum(-1)
    return (1 - mass_C).clamp(min=_SMALLEST).log()


def coarsened(top: TopScores, draft_log_probs_CV: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the recorded tokens and the tail, by target and draft.

    Without the tokens outside of the draft's vocabulary, for which the target is renormalised.

    Shapes: top [C, K], draft [C, V] -> two of [C, K + 1]; the tail is last. Differentiable in the
    draft. Unused entries have probability 0 in both.
    """
    used_CK = top.tokens_NK >= 0
    draft_CK = draft_log_probs_CV.gather(-1, top.tokens_NK.clamp(min=0))
    covered_CK = top.log_probs_NK.double() - log_coverage(top)[:, None]
    target_CK = torch.where(used_CK, covered_CK.to(draft_CK), -torch.inf)
    return _with_tail(target_CK), _with_tail(torch.where(used_CK, draft_CK, -torch.inf))


def _with_tail(log_probs_CK: Tensor) -> Tensor:
    mass_C = log_probs_CK.double().exp().sum(-1, keepdim=True)
    tail_C1 = (1 - mass_C).clamp(min=_SMALLEST).log().to(log_probs_CK)
    return torch.cat([log_probs_CK, tail_C1], -1)
