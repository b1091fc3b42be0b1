"""Divergences between target and draft, losses under a rule, and their mean.

Divergences and losses are values per token, in nats (TVD: in [0, 1]). They take log-probabilities
[..., V], target (p) first, then draft (q), and return [...].

An optimizer step over several batches or processes passes the total count to the mean, because a
mean of batch means differs from the mean of the step.
"""

# B batch, T tokens, V vocabulary

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from paceline.core.rule_base import Position

if TYPE_CHECKING:
    from paceline.core.rule_base import Rule

Mean = Literal["sequence", "token"]
RuleLoss = Literal["rejection", "negative_log_acceptance", "forward_kl"]

_SMALLEST = 1e-37  # has a finite logarithm in float32
_LEAST = 1e-15  # smallest draft probability: the gradient of a ratio divides by its square


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


def rule_loss(
    rule: Rule, target_log_probs: Tensor, draft_log_probs: Tensor, kind: RuleLoss
) -> Tensor:
    """Loss per token under the rule used for decoding, [..., V] untempered log-probabilities.

    It penalises what the rule rejects, so positions where the rule follows the draft do not count.
    Gradients flow through acceptance probabilities, not through decisions to defer.

    rejection: 1 - sum_v q(v) a(v), in [0, 1]; for `Lossless` this is TVD.
    negative_log_acceptance: -log sum_v q(v) a(v).
    forward_kl: KL(pi || q) with pi held constant; for rules that state pi.
    """
    target_probs = target_log_probs.exp()
    draft_probs = draft_log_probs.exp()
    if kind == "forward_kl":
        pi = rule.pi_at(Position.of(target_probs, draft_probs.detach()))
        assert pi is not None, "the rule states pi"
        return forward_kl(pi.detach().log(), draft_log_probs)
    at = Position(
        target_probs,
        draft_probs.clamp(min=_LEAST),
        # The draft's clamp gives it mass on all tokens, where BiLD would take the log of p = 0.
        target_raw=target_probs.clamp(min=_SMALLEST) if rule.uses_confidence else target_probs,
        draft_raw=draft_probs,
    )
    kept = draft_probs * rule.accept_at(at)
    accepted = kept.sum(-1).clamp(min=_SMALLEST)
    return 1 - accepted if kind == "rejection" else -accepted.log()


def count_units(mask_BT: Tensor, mean: Mean) -> Tensor:
    """Number of unmasked tokens, or of sequences with at least one. -> scalar."""
    if mean == "token":
        return mask_BT.sum()
    return mask_BT.any(-1).sum()


def token_weights(mask_BT: Tensor, *, mean: Mean, total: Tensor | float | None = None) -> Tensor:
    """Weights of the token losses, so that the weighted sum is the mean. -> [B, T].

    mean="sequence": mean over each sequence's tokens, then over sequences; "token": over all
    tokens. `total` is `count_units` of the whole optimizer step; None: of this batch only.

    Raises:
        ValueError: every position is masked.
    Paper: Zhou et al. 2023, Eq. 2 (sequence). Differs: the token mean is ours, an option.
    """
    units = count_units(mask_BT, mean) if total is None else total
    if units == 0:
        raise ValueError("no completion token to train on: every position is masked")
    mask = mask_BT.float()
    if mean == "token":
        return mask / units
    lengths = mask.sum(-1, keepdim=True).clamp(min=1)
    return mask / lengths / units
