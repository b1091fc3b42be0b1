"""One block judged: how many drafted tokens stay, and which token follows them.

A row of the batch may have drafted fewer tokens than the widest one (its budget ends, or a policy
stopped early); what lies beyond its own count is neither examined nor kept.
"""

# B batch, G gamma (widest block), H judged positions (G + 1), P positions of the draft, V vocabulary
from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.core.backend import registered
from paceline.core.drafted import Drafted, Uniforms, Verdict
from paceline.core.rule_base import Position
from paceline.core.rules import Lossless
from paceline.core.sampling import sample

if TYPE_CHECKING:
    from paceline.core.rule_base import Rule


def verify(
    drafted: Drafted,
    num_drafted_B: Tensor,
    target_BHV: Tensor,
    rule: Rule,
    uniforms: Uniforms,
    target_raw_BHV: Tensor | None = None,
) -> Verdict:
    """Keep drafted tokens until the first rejection, then recover; if all stay, draw a bonus.

    A rule that states its aim pi is lossless toward that; the bonus follows pi, too.

    Shapes: `drafted` with distributions, at G + 1 positions if the rule needs the draft at the
    bonus; target probabilities [B, G + 1, V], the last ones after all drafted tokens;
    `target_raw_BHV` None: not tempered. -> [B] each.
    Paper: Zhou et al. 2023, algorithm A.1; Narasimhan et al. 2024, algorithm 4.
    """
    draft_BPV = drafted.probs_BPV
    assert draft_BPV is not None, "drawn tokens come with their distributions"
    taken = registered().verify(drafted, num_drafted_B, target_BHV, rule, uniforms, target_raw_BHV)
    if taken is not None:
        return taken
    if rule.needs_draft_at_bonus:
        aim_BHV = rule.aim(Position.of(target_BHV, draft_BPV, target_raw_BHV, drafted.raw_BPV))
        assert aim_BHV is not None, "a rule without an aim takes the bonus from the target"
        toward_aim = Drafted(drafted.tokens_BG, draft_BPV[:, :-1].contiguous())
        return verify(toward_aim, num_drafted_B, aim_BHV, Lossless(), uniforms)
    positions = Position.of(target_BHV, draft_BPV, target_raw_BHV, drafted.raw_BPV)
    num_accepted_B = _count_accepted(
        drafted.tokens_BG, num_drafted_B, positions, rule, uniforms.accept_BG
    )
    is_bonus_B = num_accepted_B == num_drafted_B
    next_BV = _rows_at(target_BHV, num_accepted_B)
    gamma = drafted.tokens_BG.shape[1]
    if gamma:
        # for all rows: asking which of them need it would force a host sync
        recovery_BV = rule.recover(_position_at(positions, num_accepted_B, gamma))
        next_BV = torch.where(is_bonus_B[:, None], next_BV, recovery_BV)
    return Verdict(num_accepted_B, sample(next_BV, uniforms.next_B), is_bonus_B)


def verify_greedy(drafted_BG: Tensor, num_drafted_B: Tensor, best_BH: Tensor) -> Verdict:
    """What `verify` does at temperature 0 with a lossless rule, from the target's best tokens alone.

    Shapes: drafted [B, G], best [B, G + 1]: the target's likeliest token at each position.
    """
    gamma = drafted_BG.shape[1]
    agrees_BG = (drafted_BG == best_BH[:, :gamma]) & _was_drafted(gamma, num_drafted_B)
    num_accepted_B = agrees_BG.long().cumprod(-1).sum(-1)
    next_tokens_B = best_BH.gather(1, num_accepted_B[:, None])[:, 0]
    return Verdict(num_accepted_B, next_tokens_B, num_accepted_B == num_drafted_B)


def _count_accepted(
    drafted_BG: Tensor,
    num_drafted_B: Tensor,
    positions: Position,
    rule: Rule,
    accept_uniforms_BG: Tensor,
) -> Tensor:
    """Length of the accepted prefix of each row, [B]. Positions: [B, G or G + 1, V]."""
    gamma = drafted_BG.shape[1]
    at = Position(*(probs[:, :gamma] for probs in positions))
    if rule.entrywise:  # G numbers a row instead of G x V
        at = Position.of(*(probs.gather(-1, drafted_BG[..., None]) for probs in at[:2]))
        accept_probs_BG = rule.accept(at).squeeze(-1)
    else:
        accept_probs_BG = rule.accept(at).gather(-1, drafted_BG[..., None]).squeeze(-1)
    # In float64: a uniform just below 1 must not round up to it and reject a sure token.
    kept_BG = accept_uniforms_BG.double() < accept_probs_BG.double()
    return (kept_BG & _was_drafted(gamma, num_drafted_B)).long().cumprod(-1).sum(-1)


def _position_at(positions: Position, index_B: Tensor, gamma: int) -> Position:
    """The position at each row's index, the draft's last one in place of one beyond it, [B, V]."""
    last_B = index_B.clamp(max=gamma - 1)
    target, draft, target_raw, draft_raw = positions
    return Position.of(
        _rows_at(target, index_B),
        _rows_at(draft, last_B),
        None if target_raw is target else _rows_at(target_raw, index_B),
        None if draft_raw is draft else _rows_at(draft_raw, last_B),
    )


def _rows_at(probs_BNV: Tensor, positions_B: Tensor) -> Tensor:
    """The distribution at each row's position. [B, N, V] -> [B, V]."""
    batch, num_positions, _ = probs_BNV.shape
    flat_B = torch.arange(batch, device=positions_B.device) * num_positions + positions_B
    # A row is one stretch of memory, copied whole; indexing would fetch it entry by entry.
    return probs_BNV.flatten(0, 1).index_select(0, flat_B)


def _was_drafted(gamma: int, num_drafted_B: Tensor) -> Tensor:
    """Which of the widest block's tokens each row drafted, [B, G]."""
    return torch.arange(gamma, device=num_drafted_B.device) < num_drafted_B[:, None]
