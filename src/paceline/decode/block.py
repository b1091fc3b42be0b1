"""The two halves of a block: a draft's session draws ahead, the target's judges what was drawn.

A session that has a faster way takes the whole request; else the session only reads, and core does
the rest. Where a token is accepted: `judge` here, then `core.verification.verify`, which offers the
block to the C library (native/verification.c) and otherwise asks the rule itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from paceline.core.block import Judgement, draw_ahead, judge_block
from paceline.core.lists import as_list

if TYPE_CHECKING:
    from paceline.core.block import DrawRequest, JudgeRequest
    from paceline.core.drafted import Drafted
    from paceline.models.contract import ModelSession


def draw(session: ModelSession, request: DrawRequest) -> Drafted:
    """Read what is unread, then draw tokens, each but the last read before the next.

    Raises:
        ContextLengthError: As `ModelSession.extend`.
    """
    taken = session.take_draw(request)
    if taken is not None:
        return taken
    uniforms_BG = None
    if request.uniforms is not None:
        uniforms_BG = torch.tensor(request.uniforms, dtype=torch.float64)
    return draw_ahead(
        lambda new_BN: session.extend(new_BN)[:, -1],
        torch.tensor(request.unread),
        request.plan,
        uniforms_BG,
        request.seen_BV,
    )


def judge(session: ModelSession, request: JudgeRequest) -> Judgement:
    """Read the newest token and the drafted ones of each row; how many stay, and what follows.

    Raises:
        ContextLengthError: As `ModelSession.extend`.
    """
    taken = session.take_judge(request)
    if taken is not None:
        return taken
    tokens_BG = request.drafted.tokens_BG
    newest_B1 = torch.tensor(request.newest, device=tokens_BG.device)[:, None]
    verdict = judge_block(
        session.extend(torch.cat([newest_B1, tokens_BG], 1)),
        request.drafted,
        torch.tensor(request.num_drafted),
        request.rule,
        request.sampling,
        None if request.uniforms is None else request.uniforms.tensors(),
        request.seen_BV,
    )
    return Judgement(as_list(verdict.num_accepted_B), as_list(verdict.next_tokens_B))
