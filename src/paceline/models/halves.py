"""The two halves of a block on tensors alone: a draft draws ahead, its target judges.

Nothing here asks a device for a number, so that a device can do either half without its host.

Shape suffixes: B batch, N new tokens, G drawn ones, H judged positions (G + 1), V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from paceline.core.sampling import (
    UNTEMPERED,
    SamplingParams,
    apply_repetition_penalty,
    likeliest,
    mark_seen,
    sample,
    to_probs,
)
from paceline.core.verification import Verdict, verify, verify_greedy

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.core.rules import Rule


class Drawn(NamedTuple):
    """Tokens, and what they were drawn from.

    `probs_BGV`: the distributions, unless only the likeliest tokens counted. `raw_BGV`: untempered
    ones, where asked for and not the same. Both have one position more where the distribution behind
    the last token was asked for.
    """

    tokens_BG: Tensor
    probs_BGV: Tensor | None
    raw_BGV: Tensor | None = None

    def to(self, device: torch.device) -> Drawn:
        """The same there."""
        tokens_BG, *rest = self
        return Drawn(
            tokens_BG.to(device), *(None if part is None else part.to(device) for part in rest)
        )


class Wanted(NamedTuple):
    """What is drawn: how many tokens, and which distributions with them."""

    num_tokens: int
    sampling: SamplingParams
    behind_last: bool = False
    raw: bool = False


def draw_ahead(
    read: Callable[[Tensor], Tensor],
    unread_BN: Tensor,
    wanted: Wanted,
    uniforms_BG: Tensor | None,
    seen_BV: Tensor | None = None,
) -> Drawn:
    """Draw tokens, each but the last read before the next; the last, too, if `behind_last`.

    `read` gives the logits behind the last of the tokens [B, N] that it reads, [B, V].
    """
    count, sampling = wanted.num_tokens, wanted.sampling
    seen_BV = None if seen_BV is None else seen_BV.clone()
    drawn = [unread_BN[:, :0]]
    probs: list[Tensor] = []
    raws: list[Tensor] = []
    for place in range(count + wanted.behind_last):
        logits_BV = read(unread_BN)
        if seen_BV is not None:
            seen_BV = seen_BV.to(logits_BV.device)
            logits_BV = apply_repetition_penalty(logits_BV, seen_BV, sampling.repetition_penalty)
        if uniforms_BG is not None:
            probs.append(to_probs(logits_BV, sampling))
        if wanted.raw and not sampling.untempered:
            raws.append(to_probs(logits_BV, UNTEMPERED))
        if place == count:
            break
        if uniforms_BG is None:
            newest_B = likeliest(logits_BV)
        else:
            newest_B = sample(probs[-1], uniforms_BG[:, place])
        unread_BN = newest_B[:, None]
        if seen_BV is not None:
            seen_BV.scatter_(1, unread_BN, value=True)
        drawn.append(unread_BN)
    return Drawn(
        torch.cat([tokens.to(unread_BN.device) for tokens in drawn], 1),
        torch.stack(probs, 1) if probs else None,
        torch.stack(raws, 1) if raws else None,
    )


def judge_block(
    logits_BHV: Tensor,
    drafted: Drawn,
    num_drafted_B: Tensor,
    rule: Rule,
    sampling: SamplingParams,
    uniforms: tuple[Tensor, Tensor] | None,
    seen_BV: Tensor | None = None,
) -> Verdict:
    """How many drafted tokens stay, and the token that follows them.

    `uniforms`: one a drafted token [B, G] and one a row [B]; None compares with the likeliest tokens.
    """
    device = logits_BHV.device
    drafted, num_drafted_B = drafted.to(device), num_drafted_B.to(device)
    if seen_BV is not None:
        seen_BHV = mark_seen(drafted.tokens_BG, seen_BV.to(device))
        logits_BHV = apply_repetition_penalty(logits_BHV, seen_BHV, sampling.repetition_penalty)
    if uniforms is None:
        return verify_greedy(drafted.tokens_BG, num_drafted_B, likeliest(logits_BHV))
    assert drafted.probs_BGV is not None, "drawn tokens come with their distributions"
    target_probs_BHV = to_probs(logits_BHV, sampling)
    target_raw_BHV = None
    if rule.uses_confidence and not sampling.untempered:
        target_raw_BHV = to_probs(logits_BHV, UNTEMPERED)
    accept_BG, next_B = (numbers.to(device) for numbers in uniforms)
    return verify(
        drafted.tokens_BG,
        num_drafted_B,
        drafted.probs_BGV,
        target_probs_BHV,
        rule,
        accept_uniforms_BG=accept_BG,
        next_uniforms_B=next_B,
        target_raw_BHV=target_raw_BHV,
        draft_raw_BGV=drafted.raw_BGV,
    )
