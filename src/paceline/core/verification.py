"""Verify a batch of blocks: number of accepted tokens, and the token that follows them.

Rows may have drafted fewer tokens than the widest row; positions beyond a row's count are ignored.
"""

# B batch, G gamma (widest block), H verified positions (G + 1), P draft positions, V vocabulary
from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.core.backend import registered
from paceline.core.drafted import Drafted, Uniforms, Verdict
from paceline.core.rule_base import Position
from paceline.core.rules import Lossless
from paceline.core.sampling import sample
from paceline.errors import UsageError

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
    """Accept drafted tokens until the first rejection, then recover; if all are accepted, a bonus.

    A rule that states pi is lossless with respect to pi, and the bonus token also follows pi.

    Shapes: `drafted` with distributions, at G + 1 positions if the rule needs the draft at the
    bonus; target probabilities [B, G + 1, V], the last after all drafted tokens; `target_raw_BHV`
    None: equal to `target_BHV`. -> [B] each.
    Paper: Zhou et al. 2023, algorithm A.1; Narasimhan et al. 2024, algorithm 4.
    """
    draft_BPV = drafted.probs_BPV
    assert draft_BPV is not None, "drawn tokens come with their distributions"
    result = registered().verify(drafted, num_drafted_B, target_BHV, rule, uniforms, target_raw_BHV)
    if result is not None:
        return result
    if rule.needs_draft_at_bonus:
        aim_BHV = rule.aim(Position.of(target_BHV, draft_BPV, target_raw_BHV, drafted.raw_BPV))
        assert aim_BHV is not None, "a rule without an aim takes the bonus from the target"
        toward_aim = Drafted(drafted.tokens_BG, draft_BPV[:, :-1].contiguous())
        return verify(toward_aim, num_drafted_B, aim_BHV, Lossless(), uniforms)
    positions = Position.of(target_BHV, draft_BPV, target_raw_BHV, drafted.raw_BPV)
    num_accepted_B = _count_accepted(drafted, num_drafted_B, positions, rule, uniforms)
    is_bonus_B = num_accepted_B == num_drafted_B
    next_BV = _rows_at(target_BHV, num_accepted_B)
    gamma = drafted.tokens_BG.shape[1]
    if gamma:
        # For all rows: selecting the rows that need it would force a host sync.
        recovery_BV = rule.recover(_position_at(positions, num_accepted_B, gamma))
        _check_recovery(recovery_BV, is_bonus_B, rule)
        next_BV = torch.where(is_bonus_B[:, None], next_BV, recovery_BV)
    return Verdict(num_accepted_B, sample(next_BV, uniforms.next_B), is_bonus_B)


def _check_recovery(recovery_BV: Tensor, unused_B: Tensor, rule: Rule) -> None:
    """Raise a UsageError if `recover` returned no distribution; not on a GPU, to avoid a sync."""
    if recovery_BV.device.type != "cpu":
        return
    sums_B = recovery_BV.sum(-1)
    if not bool((sums_B.isfinite() & (sums_B > 0) | unused_B).all()):
        raise UsageError(
            f"the rule {rule} returned a distribution from `recover` that sums to 0 or is not "
            "finite; it must sum to 1 wherever a token can be rejected, also where q is 0"
        )


def verify_greedy(drafted_BG: Tensor, num_drafted_B: Tensor, best_BH: Tensor) -> Verdict:
    """`verify` for a lossless rule at temperature 0, from the target's most likely tokens only.

    Shapes: drafted [B, G], best [B, G + 1]: the target's most likely token at each position.
    """
    gamma = drafted_BG.shape[1]
    agrees_BG = (drafted_BG == best_BH[:, :gamma]) & _was_drafted(gamma, num_drafted_B)
    num_accepted_B = agrees_BG.long().cumprod(-1).sum(-1)
    next_tokens_B = best_BH.gather(1, num_accepted_B[:, None])[:, 0]
    return Verdict(num_accepted_B, next_tokens_B, num_accepted_B == num_drafted_B)


def _count_accepted(
    drafted: Drafted, num_drafted_B: Tensor, positions: Position, rule: Rule, uniforms: Uniforms
) -> Tensor:
    """Length of each row's accepted prefix, [B]. Positions: [B, G or G + 1, V]."""
    drafted_BG = drafted.tokens_BG
    gamma = drafted_BG.shape[1]
    target, draft, target_raw, draft_raw = positions
    at = Position.of(
        target[:, :gamma],
        draft[:, :gamma],
        None if target_raw is target else target_raw[:, :gamma],
        None if draft_raw is draft else draft_raw[:, :gamma],
    )
    if rule.entrywise and at.target_raw is at.target:  # gather first: G values, not G x V
        at = Position.of(*(probs.gather(-1, drafted_BG[..., None]) for probs in at[:2]))
        accept_probs_BG = rule.accept(at).squeeze(-1)
    else:
        accept_probs_BG = rule.accept(at).gather(-1, drafted_BG[..., None]).squeeze(-1)
    # float64: in float32 a uniform just below 1 would round to 1 and reject a certain token.
    accepted_BG = uniforms.accept_BG.double() < accept_probs_BG.double()
    return (accepted_BG & _was_drafted(gamma, num_drafted_B)).long().cumprod(-1).sum(-1)


def _position_at(positions: Position, index_B: Tensor, gamma: int) -> Position:
    """The distributions at each row's index, [B, V]; the draft's index is at most gamma - 1."""
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
    # index_select copies whole rows; indexing with tensors gathers entry by entry.
    return probs_BNV.flatten(0, 1).index_select(0, flat_B)


def _was_drafted(gamma: int, num_drafted_B: Tensor) -> Tensor:
    """Mask of the tokens that each row drafted, [B, G]."""
    return torch.arange(gamma, device=num_drafted_B.device) < num_drafted_B[:, None]
