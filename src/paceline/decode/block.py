"""The two halves of a block: the draft's session draws tokens, the target's session verifies them.

A session with a faster implementation serves the whole request (`take_draw`, `take_judge`).
Otherwise the session only computes logits, and the functions of `core.block` do the rest:
`core.verification.verify` uses native/verification.c where possible, else the rule's own methods.
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
    """Process the request's tokens, then draw new ones; raises as `ModelSession.extend`."""
    drafted = session.take_draw(request)
    if drafted is not None:
        return drafted
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
    """Process newest and drafted tokens in one pass and verify; raises as `ModelSession.extend`."""
    judgement = session.take_judge(request)
    if judgement is not None:
        return judgement
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
