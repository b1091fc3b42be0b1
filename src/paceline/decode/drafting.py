"""Drafts a block one token at a time, as long as the draft is confident.

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


def draft_while_confident(
    session: ModelSession,
    request: DrawRequest,
    max_lengths: Sequence[int],
    goes_on: Callable[[float], bool],
) -> tuple[Drafted, list[int]]:
    """Draft each row up to its maximum length, or until `goes_on` rejects the next token.

    `request` is for the longest row and is served one token at a time. `goes_on` gets the
    untempered max q at a position. Returns drafted tokens, and how many are valid in each row.
    """
    unread, plan, uniforms, seen_BV = request
    one_token = DrawPlan(1, plan.sampling, raw=True)
    lengths = list(max_lengths)
    seen_BV = None if seen_BV is None else seen_BV.clone()
    passes: list[Drafted] = []
    while len(passes) < max(lengths):
        position = len(passes)
        column = None if uniforms is None else [[numbers[position]] for numbers in uniforms]
        one = draw(session, DrawRequest(unread, one_token, column, seen_BV))
        passes.append(one)
        for row, confidence in enumerate(_confidence(one)):
            if position < lengths[row] and not goes_on(confidence):
                lengths[row] = position
        if seen_BV is not None:
            seen_BV.scatter_(1, one.tokens_BG.to(seen_BV.device), value=True)
        unread = as_list(one.tokens_BG)
    length = max(lengths)
    if plan.after_last and len(passes) == length:
        # no row stopped early, so the distribution after the last token needs another pass
        nothing: list[list[float]] | None = None if uniforms is None else [[] for _ in uniforms]
        last = DrawPlan(0, plan.sampling, after_last=True, raw=True)
        passes.append(draw(session, DrawRequest(unread, last, nothing, seen_BV)))
    return _concatenated(passes, length, length + plan.after_last), lengths


def _confidence(drawn: Drafted) -> list[float]:
    probs_B1V = drawn.probs_BPV if drawn.raw_BPV is None else drawn.raw_BPV
    assert probs_B1V is not None, "a draft without probs_BPV has raw_BPV"
    return as_list(probs_B1V[:, 0].amax(-1))


def _concatenated(passes: Sequence[Drafted], num_tokens: int, num_positions: int) -> Drafted:
    tokens_BG = torch.cat([one.tokens_BG for one in passes], 1)[:, :num_tokens]
    probs = [one.probs_BPV for one in passes if one.probs_BPV is not None]
    raws = [one.raw_BPV for one in passes if one.raw_BPV is not None]
    return Drafted(
        tokens_BG,
        torch.cat(probs, 1)[:, :num_positions].contiguous() if probs else None,
        torch.cat(raws, 1)[:, :num_positions].contiguous() if raws else None,
    )
