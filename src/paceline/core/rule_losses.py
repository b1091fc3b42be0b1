"""Losses of a draft under the acceptance rule used for decoding.

They penalise what the rule rejects, so positions where the rule follows the draft do not count.
Gradients flow through acceptance probabilities, not through decisions to defer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from paceline.core.divergences import forward_kl
from paceline.core.rule_base import Position

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.core.rule_base import Rule

RuleLoss = Literal["rejection", "negative_log_acceptance", "forward_kl"]

_SMALLEST = 1e-37  # has a finite logarithm in float32
_LEAST = 1e-15  # smallest draft probability: the gradient of a ratio divides by its square


def rule_loss(
    rule: Rule, target_log_probs: Tensor, draft_log_probs: Tensor, kind: RuleLoss
) -> Tensor:
    """Loss per token, [..., V] untempered log-probabilities -> [...].

    rejection: 1 - sum_v q(v) a(v), in [0, 1]; for `Lossless` this is TVD.
    negative_log_acceptance: -log sum_v q(v) a(v).
    forward_kl: KL(pi || q) with pi held constant; for rules that state pi.
    """
    target_probs = target_log_probs.exp()
    draft_probs = draft_log_probs.exp()
    if kind == "forward_kl":
        pi = rule.aim(Position.of(target_probs, draft_probs.detach()))
        assert pi is not None, "the rule states pi"
        return forward_kl(pi.detach().log(), draft_log_probs)
    at = Position(
        target_probs,
        draft_probs.clamp(min=_LEAST),
        # The draft's clamp gives it mass on all tokens, where BiLD would take the log of p = 0.
        target_raw=target_probs.clamp(min=_SMALLEST) if rule.uses_confidence else target_probs,
        draft_raw=draft_probs,
    )
    kept = draft_probs * rule.accept(at)
    accepted = kept.sum(-1).clamp(min=_SMALLEST)
    return 1 - accepted if kind == "rejection" else -accepted.log()
