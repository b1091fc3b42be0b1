"""What a draft loses under the rule that it will be served with.

Plain alignment makes the draft agree with p wherever they differ. A rule that keeps to the draft at
some places asks for agreement at the others alone, a lenient one for less of it; these losses count
what the rule itself rejects. Decisions to defer are not differentiated, only what follows from them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from paceline.core.divergences import forward_kl
from paceline.core.rule_base import Position

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.core.rule_base import Rule

RuleLoss = Literal["rejection", "negative_log_acceptance", "forward_kl"]

_SMALLEST = 1e-37  # a number still, whose logarithm is
_LEAST = 1e-15  # of a draft's probability: a ratio's slope is its square, and must stay a number


def rule_loss(
    rule: Rule, target_log_probs: Tensor, draft_log_probs: Tensor, kind: RuleLoss
) -> Tensor:
    """One value a token, [..., V] log-probabilities -> [...]; both models untempered.

    rejection: 1 - sum_v q(v) a(v), in [0, 1]; under `Lossless` this is TVD.
    negative_log_acceptance: -log sum_v q(v) a(v).
    forward_kl: KL(pi || q), pi as it is now; for rules that state pi.
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
        # what a threshold is compared with must not become infinite by what was added
        target_raw=target_probs.clamp(min=_SMALLEST),
        draft_raw=draft_probs,
    )
    kept = draft_probs * rule.accept(at)
    accepted = kept.sum(-1).clamp(min=_SMALLEST)
    return 1 - accepted if kind == "rejection" else -accepted.log()
