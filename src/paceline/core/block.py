"""A block as values: a request to draw tokens, a request to judge drafted ones, and their PyTorch form.

Requests hold lists, as decoders keep texts. `draw_ahead` and `judge_block` work on tensors alone and
never force a host sync, so that a CUDA graph can hold either.

Shape suffixes: B batch, N new tokens, G drawn ones, H judged positions (G + 1), V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from paceline.core.drafted import Drafted, Uniforms, Verdict
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
from paceline.core.verification import verify, verify_greedy

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline.core.rule_base import Rule


_LOSSLESS = Lossless()


class DrawPlan(NamedTuple):
    """What to draw for every row, and which distributions to return with it.

    Attributes:
        num_tokens: Tokens to draw (G), each read before the next one is drawn.
        sampling: How the model's distributions are shaped.
        after_last: Also read the last token, for the distribution after it.
        raw: Also return untempered distributions, where they differ.
    """

    num_tokens: int
    sampling: SamplingParams
    after_last: bool = False
    raw: bool = False

    @property
    def num_passes(self) -> int:
        return self.num_tokens + self.after_last


class DrawRequest(NamedTuple):
    """Read tokens that a session has not read, then draw more.

    Attributes:
        unread: The same number for every row, at least one.
        plan: What to draw.
        uniforms: Numbers in [0, 1) to draw with, G a row; None takes the likeliest tokens.
        seen_BV: Tokens that a repetition penalty falls on, the unread ones included.
    """

    unread: Sequence[Sequence[int]]
    plan: DrawPlan
    uniforms: Sequence[Sequence[float]] | None = None
    seen_BV: Tensor | None = None

    @property
    def only_temperature(self) -> bool:
        """Nothing but a temperature shapes the distributions."""
        return self.seen_BV is None and (self.uniforms is None or _is_plain(self.plan.sampling))


class UniformRows(NamedTuple):
    """Numbers in [0, 1): one for each drafted token, and one a row for the token that follows."""

    accept: Sequence[Sequence[float]]
    next: Sequence[float]

    def tensors(self) -> Uniforms:
        """float64."""
        return Uniforms(
            torch.tensor(self.accept, dtype=torch.float64),
            torch.tensor(self.next, dtype=torch.float64),
        )


class JudgeRequest(NamedTuple):
    """Read each row's newest token and its drafted ones, then decide which of these stay.

    Attributes:
        newest: The token of each row that no pass has read yet.
        drafted: Tokens [B, G] and, with `uniforms`, what they were drawn from.
        num_drafted: How many of the G each row drafted.
        rule: Decides what stays.
        sampling: How the model's distributions are shaped.
        uniforms: Numbers to draw with; None compares with the likeliest tokens, which is what an
            exact rule does at temperature 0, so that the rule is not asked.
        seen_BV: Tokens that a repetition penalty falls on, the newest ones included.
    """

    newest: Sequence[int]
    drafted: Drafted
    num_drafted: Sequence[int]
    rule: Rule
    sampling: SamplingParams
    uniforms: UniformRows | None = None
    seen_BV: Tensor | None = None

    @property
    def asked_rule(self) -> Rule:
        """The rule that decides: a lossless one where the likeliest tokens are compared."""
        return _LOSSLESS if self.uniforms is None else self.rule

    @property
    def only_temperature(self) -> bool:
        """Nothing but a temperature shapes the distributions."""
        return self.seen_BV is None and (self.uniforms is None or _is_plain(self.sampling))


class Judgement(NamedTuple):
    """Per row: drafted tokens kept, and the token that follows them."""

    num_accepted: list[int]
    next_tokens: list[int]


def _is_plain(sampling: SamplingParams) -> bool:
    """At temperature 0, nothing else changes the likeliest token."""
    return sampling.greedy or sampling.only_temperature


def draw_ahead(
    read: Callable[[Tensor], Tensor],
    unread_BN: Tensor,
    plan: DrawPlan,
    uniforms_BG: Tensor | None,
    seen_BV: Tensor | None = None,
) -> Drafted:
    """Draw tokens, each but the last read before the next.

    `read` gives the logits after the last of the tokens [B, N] that it reads, [B, V].
    """
    count, sampling = plan.num_tokens, plan.sampling
    seen_BV = None if seen_BV is None else seen_BV.clone()
    drawn = [unread_BN[:, :0]]
    probs: list[Tensor] = []
    raws: list[Tensor] = []
    for place in range(plan.num_passes):
        logits_BV = read(unread_BN)
        if seen_BV is not None:
            seen_BV = seen_BV.to(logits_BV.device)
            logits_BV = apply_repetition_penalty(logits_BV, seen_BV, sampling.repetition_penalty)
        if uniforms_BG is not None:
            probs.append(to_probs(logits_BV, sampling))
        if plan.raw and not sampling.untempered:
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
    return Drafted(
        torch.cat([tokens.to(unread_BN.device) for tokens in drawn], 1),
        torch.stack(probs, 1) if probs else None,
        torch.stack(raws, 1) if raws else None,
    )


def judge_block(
    logits_BHV: Tensor,
    drafted: Drafted,
    num_drafted_B: Tensor,
    rule: Rule,
    sampling: SamplingParams,
    uniforms: Uniforms | None,
    seen_BV: Tensor | None = None,
) -> Verdict:
    """Which drafted tokens stay, given the target's logits; arguments as in `JudgeRequest`."""
    device = logits_BHV.device
    drafted, num_drafted_B = drafted.to(device), num_drafted_B.to(device)
    if seen_BV is not None:
        seen_BHV = mark_seen(drafted.tokens_BG, seen_BV.to(device))
        logits_BHV = apply_repetition_penalty(logits_BHV, seen_BHV, sampling.repetition_penalty)
    if uniforms is None:
        return verify_greedy(drafted.tokens_BG, num_drafted_B, likeliest(logits_BHV))
    target_BHV = to_probs(logits_BHV, sampling)
    target_raw_BHV = None
    if rule.uses_confidence and not sampling.untempered:
        target_raw_BHV = to_probs(logits_BHV, UNTEMPERED)
    return verify(drafted, num_drafted_B, target_BHV, rule, uniforms.to(device), target_raw_BHV)
