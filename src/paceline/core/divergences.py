"""Divergences between target and draft, one value per token, in nats (TVD: in [0, 1]).

All take log-probabilities [..., V], target (p) first, then draft (q), and return [...].
`reduction` computes the mean.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def forward_kl(target_log_probs: Tensor, draft_log_probs: Tensor) -> Tensor:
    """KL(p || q) = sum_v p (log p - log q).

    Paper: Zhou et al. 2023, section 4 (FKL).
    """
    return _kl(target_log_probs, draft_log_probs)


def reverse_kl(target_log_probs: Tensor, draft_log_probs: Tensor) -> Tensor:
    """KL(q || p) = sum_v q (log q - log p).

    Paper: Zhou et al. 2023, section 4 (RKL).
    """
    return _kl(draft_log_probs, target_log_probs)


def jsd(target_log_probs: Tensor, draft_log_probs: Tensor, beta: float = 0.5) -> Tensor:
    """beta KL(p || m) + (1 - beta) KL(q || m), m = beta p + (1 - beta) q.

    Raises:
        ValueError: beta is not in (0, 1).
    Paper: Zhou et al. 2023, section 4 and appendix A (JSD[beta]).
    """
    check_beta(beta)
    # Exclude tokens of probability 0 in both: the gradient of logaddexp at (-inf, -inf) is NaN.
    possible = (target_log_probs > -torch.inf) | (draft_log_probs > -torch.inf)
    mixture = torch.logaddexp(
        torch.where(possible, target_log_probs, 0.0) + math.log(beta),
        torch.where(possible, draft_log_probs, 0.0) + math.log1p(-beta),
    )
    return beta * _kl(target_log_probs, mixture) + (1 - beta) * _kl(draft_log_probs, mixture)


def check_beta(beta: float) -> None:
    """Raise ValueError unless 0 < beta < 1."""
    if not 0 < beta < 1:
        raise ValueError(f"jsd beta must be in (0, 1), got {beta}; use forward_kl or reverse_kl")


def tvd(target_log_probs: Tensor, draft_log_probs: Tensor) -> Tensor:
    """1/2 sum_v |p - q| = 1 - sum_v min(p, q), in [0, 1]; the gradient at ties is 0.

    Paper: Zhou et al. 2023, section 4 (TVD); 1 - TVD is the acceptance rate, their Eq. 1.
    """
    # abs has gradient 0 at 0, so a draft equal to its target does not move.
    return total_variation(target_log_probs.exp(), draft_log_probs.exp())


def total_variation(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """1/2 sum_v |p - q| of probabilities, [..., V] -> [...]."""
    return 0.5 * (target_probs - draft_probs).abs().sum(-1)


def negative_log_acceptance(target_log_probs: Tensor, draft_log_probs: Tensor) -> Tensor:
    """-log sum_v min(p, q): as TVD, with a gradient that does not vanish at low overlap.

    Computed in log space: an overlap of e^-200 still has a finite value and gradient.
    """
    # Where p <= q the minimum does not depend on q: no gradient at ties, as in `tvd`.
    smaller = torch.where(
        draft_log_probs < target_log_probs, draft_log_probs, target_log_probs.detach()
    )
    return -smaller.logsumexp(-1)


def _kl(log_a: Tensor, log_b: Tensor) -> Tensor:
    """KL(a || b), with 0 log 0 = 0 (in value and gradient) where a has no mass."""
    has_mass = log_a.exp() > 0
    difference = torch.where(has_mass, log_a, 0.0) - torch.where(has_mass, log_b, 0.0)
    return (log_a.exp() * difference).sum(-1)
