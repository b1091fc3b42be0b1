"""TVD++: the policy gradient of TVD with normalised rewards.

Lemma 1: grad TVD = E_{v~q}[-r(v) grad log q(v)], r(v) = 1{p(v) > q(v)}. TVD++ replaces r(v) with
the advantage a(v) = (r(v) - mu) / sigma. Three estimators differ in the tokens of the means:

  exact    all tokens, weighted by q(v). sum_v grad q(v) = 0, so mu cancels: TVD / sigma.
  sampled  tokens drawn from q, as in Eq. 1. Unbiased up to sigma, with more variance.
  uniform  all tokens, equally weighted ("the entire vocabulary", below Eq. 1): a different loss,
           with gradient q(v) mean(a) - a(v) / V at logit v. It raises tokens with p > q equally.

Eq. 1 as printed is ascent; the sign here is Lemma 1's. Moments are over all given positions.

Paper: Goel et al. 2024, section 2.3, lemma 1, equation 1.
"""

# C positions, K drawn tokens of each, V vocabulary
from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from paceline.core.divergences import tvd
from paceline.core.sampling import BANNED_LOGIT

Estimator = Literal["exact", "sampled", "uniform"]


class RewardMoments(NamedTuple):
    """Sum and weight of 0/1 rewards; both add over parts of a batch."""

    total: Tensor
    weight: Tensor

    def advantages(self, rewards: Tensor) -> Tensor:
        """(r - mu) / sigma; 0 if all rewards are equal."""
        mean = self.total / self.weight
        deviation = (mean * (1 - mean)).clamp(min=0).sqrt()
        return torch.where(deviation > 0, (rewards - mean) / deviation, 0.0)


def reward_moments(
    target_log_probs: Tensor,
    draft_log_probs: Tensor,
    estimator: Estimator,
    drawn_CK: Tensor | None = None,
) -> RewardMoments:
    """Moments of the rewards. [C, V] log-probabilities; `drawn_CK`: tokens of q, for `sampled`."""
    rewards = _rewards(target_log_probs, draft_log_probs)
    match estimator:
        case "exact":
            weights = draft_log_probs.exp()
        case "sampled":
            assert drawn_CK is not None, "sampled needs drawn tokens"
            rewards = rewards.gather(-1, drawn_CK)
            weights = torch.ones_like(rewards)
        case "uniform":
            weights = _possible(draft_log_probs).to(rewards)
    return RewardMoments((weights * rewards).sum().double(), weights.sum().double())


def tvd_plus_plus(
    target_log_probs: Tensor,
    draft_log_probs: Tensor,
    estimator: Estimator,
    moments: RewardMoments,
    drawn_CK: Tensor | None = None,
) -> Tensor:
    """TVD in value; its gradient is an estimate of TVD++'s. [C, V] log-probabilities -> [C]."""
    with torch.no_grad():
        value = tvd(target_log_probs, draft_log_probs)
        rewards = _rewards(target_log_probs, draft_log_probs)
        advantages = moments.advantages(rewards).to(draft_log_probs)
    match estimator:
        case "exact":
            surrogate = -(draft_log_probs.exp() * advantages).sum(-1)
        case "sampled":
            assert drawn_CK is not None, "sampled needs drawn tokens"
            drawn = draft_log_probs.gather(-1, drawn_CK)
            surrogate = -(drawn * advantages.gather(-1, drawn_CK)).mean(-1)
        case "uniform":
            possible = _possible(draft_log_probs)
            parts = torch.where(possible, draft_log_probs, 0.0) * advantages
            surrogate = -torch.where(possible, parts, 0.0).sum(-1) / possible.sum(-1)
    return value + surrogate - surrogate.detach()


def _possible(log_probs: Tensor) -> Tensor:
    """True for tokens that a model may emit."""
    return log_probs > BANNED_LOGIT / 2


def _rewards(target_log_probs: Tensor, draft_log_probs: Tensor) -> Tensor:
    """1 where p > q, else 0."""
    return (target_log_probs > draft_log_probs).to(draft_log_probs)
