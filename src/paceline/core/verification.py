"""One block judged: how many drafted tokens stay, and which token follows them.

A row of the batch may have drafted fewer tokens than the widest one (its budget ends, or a policy
stopped early); what lies beyond its own count is neither examined nor kept.
"""

# B batch, G gamma (widest block), V vocabulary
from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from paceline.core.native_rules import native_rule
from paceline.core.rules import Lossless
from paceline.core.sampling import sample
from paceline.native.sampling import can_draw
from paceline.native.verification import judge

if TYPE_CHECKING:
    from paceline.core.rules import Rule
    from paceline.native.verification import NativeRule


class Verdict(NamedTuple):
    """Per row: drafted tokens kept, the token that follows them, and whether it is a bonus."""

    num_accepted_B: Tensor
    next_tokens_B: Tensor
    is_bonus_B: Tensor


def verify(
    drafted_BG: Tensor,
    num_drafted_B: Tensor,
    draft_probs_BGV: Tensor,
    target_probs_BHV: Tensor,
    rule: Rule,
    *,
    accept_uniforms_BG: Tensor,
    next_uniforms_B: Tensor,
    target_raw_BHV: Tensor | None = None,
    draft_raw_BGV: Tensor | None = None,
) -> Verdict:
    """Keep drafted tokens until the first rejection, then recover; if all stay, draw a bonus.

    A rule that states its aim pi is lossless toward that; the bonus follows pi, too.

    Shapes: drafted [B, G], draft_probs [B, G, V] ([B, G + 1, V] if the rule needs the draft at the
    bonus), target_probs [B, G + 1, V] (the last one after all drafted tokens), `*_raw` as these, or
    None where they are the same; uniforms in [0, 1) -> [B] each.
    Paper: Zhou et al. 2023, algorithm A.1; Narasimhan et al. 2024, algorithm 4.
    """
    raws = (target_raw_BHV, draft_raw_BGV)
    known = _in_c(rule, draft_probs_BGV, target_probs_BHV, *raws)
    if known is None and rule.needs_draft_at_bonus:
        aim_BHV = rule.pi(
            target_probs_BHV, draft_probs_BGV, target_raw=target_raw_BHV, draft_raw=draft_raw_BGV
        )
        assert aim_BHV is not None, "a rule without an aim takes the bonus from the target"
        target_probs_BHV = aim_BHV
        draft_probs_BGV = draft_probs_BGV[:, :-1].contiguous()
        rule, raws = Lossless(), (None, None)
        known = _in_c(rule, draft_probs_BGV, target_probs_BHV)
    tokens, probs = (drafted_BG, num_drafted_B), (draft_probs_BGV, target_probs_BHV)
    uniforms = (accept_uniforms_BG, next_uniforms_B)
    if known is None:
        return _verify_in_torch(*tokens, *probs, rule, *uniforms, *raws)
    num_accepted_B, next_tokens_B = judge(known, *tokens, *probs, *uniforms, *raws)
    return Verdict(num_accepted_B, next_tokens_B, num_accepted_B == num_drafted_B)


def _in_c(rule: Rule, *probs: Tensor | None) -> NativeRule | None:
    """The rule as the library knows it, if it does and can read these."""
    return native_rule(rule) if can_draw(*(part for part in probs if part is not None)) else None


def _verify_in_torch(
    drafted_BG: Tensor,
    num_drafted_B: Tensor,
    draft_probs_BGV: Tensor,
    target_probs_BHV: Tensor,
    rule: Rule,
    accept_uniforms_BG: Tensor,
    next_uniforms_B: Tensor,
    target_raw_BHV: Tensor | None,
    draft_raw_BGV: Tensor | None,
) -> Verdict:
    """`verify` for any rule whose bonus comes from the target."""
    num_accepted_B = count_accepted(
        drafted_BG,
        num_drafted_B,
        draft_probs_BGV,
        target_probs_BHV,
        rule,
        accept_uniforms_BG,
        target_raw_BHV=target_raw_BHV,
        draft_raw_BGV=draft_raw_BGV,
    )
    is_bonus_B = num_accepted_B == num_drafted_B
    next_probs_BV = _rows_at(target_probs_BHV, num_accepted_B)
    gamma = drafted_BG.shape[1]
    if gamma:
        # for all rows: to ask which need it would make a device wait for its host
        last_B = num_accepted_B.clamp(max=gamma - 1)
        recovery_BV = rule.residual(
            next_probs_BV,
            _rows_at(draft_probs_BGV, last_B),
            target_raw=None if target_raw_BHV is None else _rows_at(target_raw_BHV, num_accepted_B),
            draft_raw=None if draft_raw_BGV is None else _rows_at(draft_raw_BGV, last_B),
        )
        next_probs_BV = torch.where(is_bonus_B[:, None], next_probs_BV, recovery_BV)
    return Verdict(num_accepted_B, sample(next_probs_BV, next_uniforms_B), is_bonus_B)


def verify_greedy(drafted_BG: Tensor, num_drafted_B: Tensor, best_BH: Tensor) -> Verdict:
    """What `verify` does at temperature 0 with a lossless rule, from the target's best tokens alone.

    Shapes: drafted [B, G], best [B, G + 1]: the target's likeliest token at each position.
    """
    gamma = drafted_BG.shape[1]
    agrees_BG = (drafted_BG == best_BH[:, :gamma]) & _was_drafted(gamma, num_drafted_B)
    num_accepted_B = agrees_BG.long().cumprod(-1).sum(-1)
    next_tokens_B = best_BH.gather(1, num_accepted_B[:, None])[:, 0]
    return Verdict(num_accepted_B, next_tokens_B, num_accepted_B == num_drafted_B)


def _rows_at(probs_BNV: Tensor, positions_B: Tensor) -> Tensor:
    """The distribution at each row's position. [B, N, V] -> [B, V]."""
    batch, num_positions, _ = probs_BNV.shape
    flat_B = torch.arange(batch, device=positions_B.device) * num_positions + positions_B
    # A row is one stretch of memory, copied whole; indexing would fetch it entry by entry.
    return probs_BNV.flatten(0, 1).index_select(0, flat_B)


def _was_drafted(gamma: int, num_drafted_B: Tensor) -> Tensor:
    """Which of the widest block's tokens each row drafted, [B, G]."""
    return torch.arange(gamma, device=num_drafted_B.device) < num_drafted_B[:, None]


def count_accepted(
    drafted_BG: Tensor,
    num_drafted_B: Tensor,
    draft_probs_BGV: Tensor,
    target_probs_BHV: Tensor,
    rule: Rule,
    accept_uniforms_BG: Tensor,
    *,
    target_raw_BHV: Tensor | None = None,
    draft_raw_BGV: Tensor | None = None,
) -> Tensor:
    """Length of the accepted prefix of each row, [B]."""
    gamma = drafted_BG.shape[1]
    p_BGV, q_BGV = target_probs_BHV[:, :gamma], draft_probs_BGV
    if rule.entrywise:  # G numbers a row instead of G x V
        p_BG1, q_BG1 = (probs.gather(-1, drafted_BG[..., None]) for probs in (p_BGV, q_BGV))
        accept_probs_BG = rule.accept_probs(p_BG1, q_BG1).squeeze(-1)
    else:
        raw_BGV = None if target_raw_BHV is None else target_raw_BHV[:, :gamma]
        accept_probs_BGV = rule.accept_probs(
            p_BGV, q_BGV, target_raw=raw_BGV, draft_raw=draft_raw_BGV
        )
        accept_probs_BG = accept_probs_BGV.gather(-1, drafted_BG[..., None]).squeeze(-1)
    was_drafted_BG = _was_drafted(gamma, num_drafted_B)
    # In float64: a uniform just below 1 must not round up to it and reject a sure token.
    kept_BG = (accept_uniforms_BG.double() < accept_probs_BG.double()) & was_drafted_BG
    return kept_BG.long().cumprod(-1).sum(-1)
