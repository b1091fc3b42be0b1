"""The two halves of a block: the draft's session draws tokens, the target's session verifies them.

A session with a faster implementation serves the whole request (`take_draw`, `take_verify`).
Otherwise the session only computes logits, and the functions of `core.block` do the rest.

Shape suffixes: B batch, N new tokens, G drafted, H G + 1, P positions, V vocabulary.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch

from paceline.core.block import (
    Drafted,
    DrawPlan,
    DrawRequest,
    Verified,
    draw_ahead,
    draw_at_once,
    verify_block,
)
from paceline.core.sampling import as_list

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline.core.block import VerifyRequest
    from paceline.models.contract import ModelSession


def draw(session: ModelSession, request: DrawRequest) -> Drafted:
    """Process the request's tokens, then draw new ones; raises as `ModelSession.extend`.

    Masks of a parallel draft leave the session's cache again.
    """
    drafted = None if request.plan.mask is not None else session.take_draw(request)
    if drafted is not None:
        return drafted
    uniforms_BG = None
    if request.uniforms is not None:
        uniforms_BG = torch.tensor(request.uniforms, dtype=torch.float64)
    if request.plan.mask is not None:
        unread_BN = torch.tensor(request.unread)
        drafted = draw_at_once(
            session.extend, unread_BN, request.plan, uniforms_BG, request.seen_BV
        )
        session.rollback([request.plan.num_passes - 1] * len(unread_BN))
        return drafted
    return draw_ahead(
        lambda new_BN: session.extend(new_BN)[:, -1],
        torch.tensor(request.unread),
        request.plan,
        uniforms_BG,
        request.seen_BV,
    )


def verify(
    session: ModelSession, request: VerifyRequest, again: Sequence[Sequence[int]] = ()
) -> Verified:
    """Process newest and drafted tokens in one pass and verify; raises as `ModelSession.extend`.

    `again`: last tokens that each row has processed, to process again in place of what would lie
    beyond its context.
    """
    verified = None if any(again) else session.take_verify(request)
    if verified is not None:
        return verified
    tokens_BG = request.drafted.tokens_BG
    newest_B1 = torch.tensor(request.newest, device=tokens_BG.device)[:, None]
    tokens_BH = torch.cat([newest_B1, tokens_BG], 1)
    if not any(again):
        logits_BHV = session.extend(tokens_BH)
    else:
        counts, width = list(map(len, again)), tokens_BH.shape[1]
        session.rollback(counts)
        pairs = zip(again, as_list(tokens_BH), strict=True)
        logits_BHV = session.extend(torch.tensor([[*old, *new][:width] for old, new in pairs]))
        rows = zip(logits_BHV, counts, strict=True)  # from the newest token on
        logits_BHV = torch.stack([logits_HV.roll(-count, 0) for logits_HV, count in rows])
    blocks = verify_block(
        logits_BHV,
        request.drafted,
        torch.tensor(request.num_drafted),
        request.rule,
        request.sampling,
        request.uniforms,
        request.seen_BV,
    )
    return Verified(*map(as_list, blocks))


def draft_while_confident(
    session: ModelSession,
    request: DrawRequest,
    max_lengths: Sequence[int],
    goes_on: Callable[[float], bool],
) -> tuple[Drafted, list[int]]:
    """Draft each row up to its maximum length, or until `goes_on` rejects the next token.

    `request` is for the longest row and is served one token at a time; by one pass for a parallel
    draft, whose q is known at all places then. `goes_on` gets the untempered max q at a position.
    Returns drafted tokens, and how many are valid in each row.
    """
    unread, plan, uniforms, seen_BV = request
    if plan.mask is not None:
        drawn = draw(session, request._replace(plan=plan._replace(raw=True)))
        rows = zip(_confidence(drawn), max_lengths, strict=True)
        return drawn, [len([*itertools.takewhile(goes_on, row[:most])]) for row, most in rows]
    one_token = DrawPlan(1, plan.sampling, raw=True)
    lengths = list(max_lengths)
    seen_BV = None if seen_BV is None else seen_BV.clone()
    passes: list[Drafted] = []
    while len(passes) < max(lengths):
        position = len(passes)
        column = None if uniforms is None else [[numbers[position]] for numbers in uniforms]
        drawn = draw(session, DrawRequest(unread, one_token, column, seen_BV))
        passes.append(drawn)
        for row, (confidence, *_) in enumerate(_confidence(drawn)):
            if position < lengths[row] and not goes_on(confidence):
                lengths[row] = position
        if seen_BV is not None:
            seen_BV.scatter_(1, drawn.tokens_BG.to(seen_BV.device), value=True)
        unread = as_list(drawn.tokens_BG)
    length = max(lengths)
    if plan.after_last and len(passes) == length:
        # no row stopped early, so the distribution after the last token needs another pass
        nothing: list[list[float]] | None = None if uniforms is None else [[] for _ in uniforms]
        last = DrawPlan(0, plan.sampling, after_last=True, raw=True)
        passes.append(draw(session, DrawRequest(unread, last, nothing, seen_BV)))
    return _concatenated(passes, length, length + plan.after_last), lengths


def _confidence(drawn: Drafted) -> list[list[float]]:
    """Untempered max q at each place of each row."""
    probs_BPV = drawn.probs_BPV if drawn.raw_BPV is None else drawn.raw_BPV
    assert probs_BPV is not None, "a draft without probs_BPV has raw_BPV"
    return as_list(probs_BPV.amax(-1))


def _concatenated(passes: Sequence[Drafted], num_tokens: int, num_positions: int) -> Drafted:
    tokens_BG = torch.cat([drawn.tokens_BG for drawn in passes], 1)[:, :num_tokens]
    probs = [drawn.probs_BPV for drawn in passes if drawn.probs_BPV is not None]
    raws = [drawn.raw_BPV for drawn in passes if drawn.raw_BPV is not None]
    return Drafted(
        tokens_BG,
        torch.cat(probs, 1)[:, :num_positions].contiguous() if probs else None,
        torch.cat(raws, 1)[:, :num_positions].contiguous() if raws else None,
    )
