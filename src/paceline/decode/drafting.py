"""A block drafted one pass at a time, for as long as the draft is sure.

Shape suffixes: B batch, G drafted, P positions, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from paceline.core.block import DrawPlan, DrawRequest
from paceline.core.drafted import Drafted
from paceline.core.lists import as_list
from paceline.decode.block import draw

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline.models.contract import ModelSession


def draft_while_sure(
    session: ModelSession,
    request: DrawRequest,
    wanted: Sequence[int],
    goes_on: Callable[[float], bool],
) -> tuple[Drafted, list[int]]:
    """Draft until each row has what it wanted, or is not sure enough of the token to be drawn next.

    Args:
        session: The draft's.
        request: For the longest row; served one token at a time.
        wanted: Tokens for each row, at most.
        goes_on: Whether a row drafts on at this max q, untempered.

    Returns: tokens of the longest draft, and how many of them each row means.
    """
    unread, plan, uniforms, seen_BV = request
    one_token = DrawPlan(1, plan.sampling, raw=True)
    ends = list(wanted)
    seen_BV = None if seen_BV is None else seen_BV.clone()
    passes: list[Drafted] = []
    while len(passes) < max(ends):
        place = len(passes)
        column = None if uniforms is None else [[numbers[place]] for numbers in uniforms]
        one = draw(session, DrawRequest(unread, one_token, column, seen_BV))
        passes.append(one)
        for row, confidence in enumerate(_confidence(one)):
            if place < ends[row] and not goes_on(confidence):
                ends[row] = place
        if seen_BV is not None:
            seen_BV.scatter_(1, one.tokens_BG.to(seen_BV.device), value=True)
        unread = as_list(one.tokens_BG)
    length = max(ends)
    if plan.after_last and len(passes) == length:
        # no row stopped here: the pass that would tell how sure the draft is has not been made
        nothing: list[list[float]] | None = None if uniforms is None else [[] for _ in uniforms]
        last = DrawPlan(0, plan.sampling, after_last=True, raw=True)
        passes.append(draw(session, DrawRequest(unread, last, nothing, seen_BV)))
    return _joined(passes, length, length + plan.after_last), ends


def _confidence(drawn: Drafted) -> list[float]:
    probs_B1V = drawn.probs_BPV if drawn.raw_BPV is None else drawn.raw_BPV
    assert probs_B1V is not None, "only greedy drafts come without distributions, and those are raw"
    return as_list(probs_B1V[:, 0].amax(-1))


def _joined(passes: Sequence[Drafted], num_tokens: int, num_positions: int) -> Drafted:
    """The passes as one draft of so many tokens, with so many positions' distributions."""
    tokens_BG = torch.cat([one.tokens_BG for one in passes], 1)[:, :num_tokens]
    probs = [one.probs_BPV for one in passes if one.probs_BPV is not None]
    raws = [one.raw_BPV for one in passes if one.raw_BPV is not None]
    return Drafted(
        tokens_BG,
        torch.cat(probs, 1)[:, :num_positions].contiguous() if probs else None,
        torch.cat(raws, 1)[:, :num_positions].contiguous() if raws else None,
    )
