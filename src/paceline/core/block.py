"""Draft and verify a batch of blocks: requests, results and their PyTorch implementation.

Requests hold lists of tokens. `draw_ahead` and `verify_block` work on tensors and never force a
host sync on a GPU, so that CUDA graphs can capture them. Rows may have drafted fewer tokens than
the widest row; positions beyond a row's count are ignored.

Shape suffixes: B batch, N new tokens, G gamma (widest block), H verified positions (G + 1),
P positions of the draft (G, or one more), V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from paceline.core.backend import registered
from paceline.core.rule_base import Position
from paceline.core.rules import Lossless
from paceline.core.sampling import (
    UNTEMPERED,
    SamplingParams,
    apply_repetition_penalty,
    likeliest,
    mark_seen,
    sample,
    to_probs,
)
from paceline.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline.core.rule_base import Rule

_LOSSLESS = Lossless()


class Drafted(NamedTuple):
    """Drafted tokens and their distributions.

    Attributes:
        tokens_BG: The tokens.
        probs_BPV: The distributions they were drawn from; None after greedy drafting. P is G, or
            G + 1 with the distribution after the last token.
        raw_BPV: Untempered distributions; None if not requested or equal to `probs_BPV`.
    """

    tokens_BG: Tensor
    probs_BPV: Tensor | None
    raw_BPV: Tensor | None = None

    def to(self, device: torch.device) -> Drafted:
        """Move to a device."""
        tokens_BG, *rest = self
        return Drafted(
            tokens_BG.to(device), *(None if part is None else part.to(device) for part in rest)
        )


class Uniforms(NamedTuple):
    """Numbers in [0, 1): one per drafted token, and one per row for the token after the block.

    Lists in a request, tensors where they are compared.
    """

    accept: Any
    next: Any

    def to(self, device: torch.device) -> Uniforms:
        """As float64 tensors on a device."""
        return Uniforms(
            *(torch.as_tensor(part, dtype=torch.float64, device=device) for part in self)
        )


class Verified(NamedTuple):
    """Per row: number of accepted tokens, and the token that follows them; lists or tensors."""

    num_accepted: Any
    next_tokens: Any


class DrawPlan(NamedTuple):
    """What to draw for every row, and which distributions to return.

    Attributes:
        num_tokens: Tokens to draw, G; each is processed before the next one is drawn.
        sampling: Sampling parameters of the model.
        after_last: Also process the last token and return the distribution after it.
        raw: Also return untempered distributions if they differ.
        mask: Token of parallel drafting: all tokens come from one pass over the unread tokens and
            masks; see `draw_at_once`. None: each token is processed before the next one.
    """

    num_tokens: int
    sampling: SamplingParams
    after_last: bool = False
    raw: bool = False
    mask: int | None = None

    @property
    def num_passes(self) -> int:
        """Places with a distribution; passes of the model, if `mask` is None."""
        return self.num_tokens + self.after_last


class DrawRequest(NamedTuple):
    """Process unread tokens, then draw more.

    Attributes:
        unread: Tokens not yet processed, the same number for every row, at least one.
        plan: What to draw.
        uniforms: Numbers in [0, 1), G per row; None: draw the most likely tokens.
        seen_BV: Tokens under the repetition penalty, including the unread ones.
    """

    unread: Sequence[Sequence[int]]
    plan: DrawPlan
    uniforms: Sequence[Sequence[float]] | None = None
    seen_BV: Tensor | None = None


class VerifyRequest(NamedTuple):
    """Process each row's newest token and its drafted tokens, then verify the drafted ones.

    Attributes:
        newest: Each row's last token, not yet processed.
        drafted: Tokens [B, G] and, with `uniforms`, the distributions they were drawn from.
        num_drafted: Number of drafted tokens per row, at most G; -1: none, and the token that
            follows is the target's under any rule.
        rule: Acceptance rule.
        sampling: Sampling parameters of the target.
        uniforms: Random numbers; None: accept while drafted tokens are the target's most likely
            ones. An exact rule does the same at temperature 0, so `rule` is not used.
        seen_BV: Tokens under the repetition penalty, including the newest ones.
    """

    newest: Sequence[int]
    drafted: Drafted
    num_drafted: Sequence[int]
    rule: Rule
    sampling: SamplingParams
    uniforms: Uniforms | None = None
    seen_BV: Tensor | None = None

    @property
    def applied_rule(self) -> Rule:
        """The rule in effect: `Lossless` for greedy verification."""
        return _LOSSLESS if self.uniforms is None else self.rule


def draw_ahead(
    read: Callable[[Tensor], Tensor],
    unread_BN: Tensor,
    plan: DrawPlan,
    uniforms_BG: Tensor | None,
    seen_BV: Tensor | None = None,
) -> Drafted:
    """Draw tokens one by one; `read` maps tokens [B, N] to the logits after the last, [B, V]."""
    count, sampling = plan.num_tokens, plan.sampling
    seen_BV = None if seen_BV is None else seen_BV.clone()
    drawn = [unread_BN[:, :0]]
    probs: list[Tensor] = []
    raws: list[Tensor] = []
    for index in range(plan.num_passes):
        logits_BV = read(unread_BN)
        if seen_BV is not None:
            seen_BV = seen_BV.to(logits_BV.device)
            logits_BV = apply_repetition_penalty(logits_BV, seen_BV, sampling.repetition_penalty)
        if uniforms_BG is not None:
            probs.append(to_probs(logits_BV, sampling))
        if plan.raw and not sampling.untempered:
            raws.append(to_probs(logits_BV, UNTEMPERED))
        if index == count:
            break
        if uniforms_BG is None:
            newest_B = likeliest(logits_BV)
        else:
            newest_B = sample(probs[-1], uniforms_BG[:, index])
        unread_BN = newest_B[:, None]
        if seen_BV is not None:
            seen_BV.scatter_(1, unread_BN, value=True)
        drawn.append(unread_BN)
    return Drafted(
        torch.cat([tokens.to(unread_BN.device) for tokens in drawn], 1),
        torch.stack(probs, 1) if probs else None,
        torch.stack(raws, 1) if raws else None,
    )


def draw_at_once(
    read: Callable[[Tensor], Tensor],
    unread_BN: Tensor,
    plan: DrawPlan,
    uniforms_BG: Tensor | None,
    seen_BV: Tensor | None = None,
) -> Drafted:
    """Draw all tokens from one pass; `read` maps tokens [B, N + P - 1] to their logits.

    Behind the unread tokens come P - 1 masks. q_j, the distribution of the j-th token, is read at
    the (j - 1)-th mask, q_1 at the newest token: each depends on the text alone, and on no drafted
    token. The proof that verification is lossless asks for no more than that token j was drawn from
    q_j; acceptance falls with j, as q_j is a marginal over the tokens before it.

    Paper: An et al. 2025, arXiv 2504.18583.
    """
    masks = unread_BN.new_full((len(unread_BN), plan.num_passes - 1), plan.mask or 0)
    logits_BPV = read(torch.cat([unread_BN, masks], 1))[:, -plan.num_passes :]
    if seen_BV is not None:
        seen_B1V, penalty = seen_BV.to(logits_BPV.device)[:, None], plan.sampling.repetition_penalty
        logits_BPV = apply_repetition_penalty(logits_BPV, seen_B1V, penalty)
    raw = plan.raw and not plan.sampling.untempered
    raw_BPV = to_probs(logits_BPV, UNTEMPERED) if raw else None
    if uniforms_BG is None:
        return Drafted(likeliest(logits_BPV[:, : plan.num_tokens]), None, raw_BPV)
    probs_BPV = to_probs(logits_BPV, plan.sampling)
    drawn = sample(probs_BPV[:, : plan.num_tokens].flatten(0, 1), uniforms_BG.flatten())
    return Drafted(drawn.view(len(unread_BN), -1), probs_BPV, raw_BPV)


def verify_block(
    logits_BHV: Tensor,
    drafted: Drafted,
    num_drafted_B: Tensor,
    rule: Rule,
    sampling: SamplingParams,
    uniforms: Uniforms | None,
    seen_BV: Tensor | None = None,
) -> Verified:
    """Verify drafted tokens against the target's logits; arguments as in `VerifyRequest`."""
    device = logits_BHV.device
    drafted, num_drafted_B = drafted.to(device), num_drafted_B.to(device)
    if seen_BV is not None:
        seen_BHV = mark_seen(drafted.tokens_BG, seen_BV.to(device))
        logits_BHV = apply_repetition_penalty(logits_BHV, seen_BHV, sampling.repetition_penalty)
    if uniforms is None:
        return verify_greedy(drafted.tokens_BG, num_drafted_B, likeliest(logits_BHV))
    target_BHV = to_probs(logits_BHV, sampling)
    target_raw_BHV = None
    if rule.reads_raw(sampling):
        target_raw_BHV = to_probs(logits_BHV, UNTEMPERED)
    return verify(drafted, num_drafted_B, target_BHV, rule, uniforms.to(device), target_raw_BHV)


def verify(
    drafted: Drafted,
    num_drafted_B: Tensor,
    target_BHV: Tensor,
    rule: Rule,
    uniforms: Uniforms,
    target_raw_BHV: Tensor | None = None,
) -> Verified:
    """Accept drafted tokens until the first rejection, then recover; if all are accepted, a bonus.

    A rule that states pi is lossless with respect to pi, and the bonus token also follows pi.

    Shapes: `drafted` with distributions, at G + 1 positions if the rule needs the draft at the
    bonus; target probabilities [B, G + 1, V], the last after all drafted tokens; `target_raw_BHV`
    None: equal to `target_BHV`. -> [B] each.
    Paper: Zhou et al. 2023, algorithm A.1; Narasimhan et al. 2024, algorithm 4.
    """
    draft_BPV = drafted.probs_BPV
    assert draft_BPV is not None, "drawn tokens come with their distributions"
    positions = Position.of(target_BHV, draft_BPV, target_raw_BHV, drafted.raw_BPV)
    alone_B1 = num_drafted_B[:, None] < 0
    if rule.needs_draft_at_bonus and not rule.entrywise:
        pi_BHV = rule.pi_at(positions)
        assert pi_BHV is not None, "a rule without pi takes the bonus from the target"
        pi_BHV = torch.where(alone_B1[..., None], target_BHV, pi_BHV)
        positions, rule = Position.of(pi_BHV, draft_BPV), _LOSSLESS
    if type(rule) is Lossless:
        result = registered().verify_lossless(
            positions.target, draft_BPV, drafted.tokens_BG, num_drafted_B, uniforms
        )
        if result is not None:
            return Verified(*result)
    num_accepted_B = _count_accepted(drafted, num_drafted_B, positions, rule, uniforms)
    is_bonus_B = num_accepted_B >= num_drafted_B
    next_BV = _distribution_at(positions, num_accepted_B, is_bonus_B, rule)
    if rule.needs_draft_at_bonus:
        next_BV = torch.where(alone_B1, positions.target[:, 0], next_BV)
    return Verified(num_accepted_B, sample(next_BV, uniforms.next))


def _distribution_at(
    positions: Position, index_B: Tensor, is_bonus_B: Tensor, rule: Rule
) -> Tensor:
    """What each row's next token follows, [B, V]: the rule's pi or the target, or the residual."""
    num_drafts = positions.draft.shape[1]
    if num_drafts == 0:
        return _rows_at(positions.target, index_B)
    at = positions.each(lambda probs: _rows_at(probs, index_B.clamp(max=probs.shape[1] - 1)))
    # On a GPU a test would force a host sync, so both are computed for all rows.
    on_cpu = index_B.device.type == "cpu"
    any_bonus = not on_cpu or bool(is_bonus_B.any())
    bonus_BV = rule.pi_at(at) if any_bonus and rule.needs_draft_at_bonus else at.target
    assert bonus_BV is not None, "a rule without pi takes the bonus from the target"
    if on_cpu and bool(is_bonus_B.all()):
        return bonus_BV
    residual_BV = rule.residual_at(at)
    _check_residual(residual_BV, is_bonus_B, rule)
    return torch.where(is_bonus_B[:, None], bonus_BV, residual_BV) if any_bonus else residual_BV


def _check_residual(residual_BV: Tensor, unused_B: Tensor, rule: Rule) -> None:
    """Raise a UsageError if `residual_at` returned no distribution; not on a GPU: it would sync."""
    if residual_BV.device.type != "cpu":
        return
    sums_B = residual_BV.sum(-1)
    if not bool((sums_B.isfinite() & (sums_B > 0) | unused_B).all()):
        raise UsageError(
            f"the rule {rule} returned a distribution from `residual_at` that sums to 0 or is not "
            "finite; it must sum to 1 wherever a token can be rejected, also where q is 0"
        )


def verify_greedy(drafted_BG: Tensor, num_drafted_B: Tensor, best_BH: Tensor) -> Verified:
    """`verify` for a lossless rule at temperature 0, from the target's most likely tokens only.

    Shapes: drafted [B, G], best [B, G + 1]: the target's most likely token at each position.
    """
    gamma = drafted_BG.shape[1]
    agrees_BG = (drafted_BG == best_BH[:, :gamma]) & _was_drafted(gamma, num_drafted_B)
    num_accepted_B = agrees_BG.long().cumprod(-1).sum(-1)
    next_tokens_B = best_BH.gather(1, num_accepted_B[:, None])[:, 0]
    return Verified(num_accepted_B, next_tokens_B)


def _count_accepted(
    drafted: Drafted, num_drafted_B: Tensor, positions: Position, rule: Rule, uniforms: Uniforms
) -> Tensor:
    """Length of each row's accepted prefix, [B]. Positions: [B, G or G + 1, V]."""
    drafted_BG = drafted.tokens_BG
    gamma = drafted_BG.shape[1]
    at = positions.each(lambda probs: probs[:, :gamma])
    accept_probs_BG = rule.accept_tokens_at(at, drafted_BG[..., None]).squeeze(-1)
    # float64: in float32 a uniform just below 1 would round to 1 and reject a certain token.
    accepted_BG = uniforms.accept.double() < accept_probs_BG.double()
    return (accepted_BG & _was_drafted(gamma, num_drafted_B)).long().cumprod(-1).sum(-1)


def _rows_at(probs_BNV: Tensor, positions_B: Tensor) -> Tensor:
    """The distribution at each row's position. [B, N, V] -> [B, V]."""
    batch, num_positions, _ = probs_BNV.shape
    flat_B = torch.arange(batch, device=positions_B.device) * num_positions + positions_B
    # index_select copies whole rows; indexing with tensors gathers entry by entry.
    return probs_BNV.flatten(0, 1).index_select(0, flat_B)


def _was_drafted(gamma: int, num_drafted_B: Tensor) -> Tensor:
    """Mask of the tokens that each row drafted, [B, G]."""
    return torch.arange(gamma, device=num_drafted_B.device) < num_drafted_B[:, None]
