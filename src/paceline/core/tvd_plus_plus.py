"""TVD++: the slope of TVD as a policy gradient, its rewards normalised.

Lemma 1: grad TVD = E_{v~q}[-r(v) grad log q(v)], r(v) = 1{p(v) > q(v)}. TVD++ puts the advantage
a(v) = (r(v) - mu) / sigma in the place of r(v). Over which tokens the mean is taken, and with it mu
and sigma, makes three estimators:

  exact    v ~ q, every token weighed by q(v). sum_v grad q(v) = 0, so mu drops out: TVD / sigma.
  sampled  tokens drawn from q, as Eq. 1 is printed. Right on average up to sigma, and noisier.
  uniform  every token of the vocabulary alike, as "the entire vocabulary" below Eq. 1 reads: another
           loss. Its slope at the logit of v is q(v) mean(a) - a(v) / V: where p > q it lifts all tokens
           alike, however likely.

Eq. 1 as printed ascends; the sign here is Lemma 1's. The moments are those of all positions given.

Paper: Goel et al. 2024, section 2.3, lemma 1, equation 1.
"""

# C positions, K drawn tokens of each, V vocabulary
from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from paceline.core.divergences import tvd

Estimator = Literal["exact", "sampled", "uniform"]


class RewardMoments(NamedTuple):
    """Sum and weight of rewards that are 0 or 1; those of two parts of a batch add up."""

    total: Tensor
    weight: Tensor

    def plus(self, other: RewardMoments) -> RewardMoments:
        return RewardMoments(self.total + other.total, self.weight + other.weight)

    def advantages(self, rewards: Tensor) -> Tensor:
        """(r - mu) / sigma; 0 where all rewards are the same, which tells nothing."""
        mean = self.total / self.weight
        deviation = (mean * (1 - mean)).clamp(min=0).sqrt()
        return torch.where(deviation > 0, (rewards - mean) / deviation, 0.0)


def reward_moments(
    target_log_probs: Tensor,
    draft_log_probs: Tensor,
    estimator: Estimator,
    drawn_CK: Tensor | None = None,
) -> RewardMoments:
    """Of these positions. [C, V] log-probabilities; `drawn_CK`: tokens drawn from q, for `sampled`."""
    rewards = _rewards(target_log_probs, draft_log_probs)
    match estimator:
        case "exact":
            weights = draft_log_probs.exp()
        case "sampled":
            assert drawn_CK is not None, "sampled needs drawn tokens"
            rewards = rewards.gather(-1, drawn_CK)
            weights = torch.ones_like(rewards)
        case "uniform":
            weights = (draft_log_probs > -torch.inf).to(rewards)
    return RewardMoments((weights * rewards).sum().double(), weights.sum().double())


def tvd_plus_plus(
    target_log_probs: Tensor,
    draft_log_probs: Tensor,
    estimator: Estimator,
    moments: RewardMoments,
    drawn_CK: Tensor | None = None,
) -> Tensor:
    """TVD by its value, an estimate of TVD++ by its slope. [C, V] log-probabilities -> [C]."""
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
            possible = draft_log_probs > -torch.inf
            parts = torch.where(possible, draft_log_probs, 0.0) * advantages
            surrogate = -torch.where(possible, parts, 0.0).sum(-1) / possible.sum(-1)
    return value + surrogate - surrogate.detach()


def _rewards(target_log_probs: Tensor, draft_log_probs: Tensor) -> Tensor:
    """1 where the target likes a token better than the draft does, else 0."""
    return (target_log_probs > draft_log_probs).to(draft_log_probs)
