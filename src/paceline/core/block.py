"""Draft and verify a block: requests, and their PyTorch implementation.

Requests hold lists of tokens. `draw_ahead` and `judge_block` work on tensors only and never force a
host sync, so that CUDA graphs can capture them.

Shape suffixes: B batch, N new tokens, G drawn ones, H verified positions (G + 1), V vocabulary.
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
    """What to draw for every row, and which distributions to return.

    Attributes:
        num_tokens: Tokens to draw, G; each is processed before the next one is drawn.
        sampling: Sampling parameters of the model.
        after_last: Also process the last token and return the distribution after it.
        raw: Also return untempered distributions if they differ.
    """

    num_tokens: int
    sampling: SamplingParams
    after_last: bool = False
    raw: bool = False

    @property
    def num_passes(self) -> int:
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

    @property
    def only_temperature(self) -> bool:
        """True if only a temperature changes the logits."""
        return self.seen_BV is None and (self.uniforms is None or _is_plain(self.plan.sampling))


class UniformRows(NamedTuple):
    """Numbers in [0, 1): one per drafted token, and one per row for the token after the block."""

    accept: Sequence[Sequence[float]]
    next: Sequence[float]

    def tensors(self) -> Uniforms:
        """As float64 tensors."""
        return Uniforms(*(torch.tensor(numbers, dtype=torch.float64) for numbers in self))


class JudgeRequest(NamedTuple):
    """Process each row's newest token and its drafted tokens, then verify the drafted ones.

    Attributes:
        newest: Each row's last token, not yet processed.
        drafted: Tokens [B, G] and, with `uniforms`, the distributions they were drawn from.
        num_drafted: Number of drafted tokens per row, at most G.
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
    uniforms: UniformRows | None = None
    seen_BV: Tensor | None = None

    @property
    def asked_rule(self) -> Rule:
        """The rule in effect: `Lossless` for greedy verification."""
        return _LOSSLESS if self.uniforms is None else self.rule

    @property
    def only_temperature(self) -> bool:
        """True if only a temperature changes the logits."""
        return self.seen_BV is None and (self.uniforms is None or _is_plain(self.sampling))


class Judgement(NamedTuple):
    """Per row: number of accepted tokens, and the token that follows them."""

    num_accepted: list[int]
    next_tokens: list[int]


def _is_plain(sampling: SamplingParams) -> bool:
    """True if no filter is active; at temperature 0 filters keep the most likely token."""
    return sampling.greedy or sampling.only_temperature


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


def judge_block(
    logits_BHV: Tensor,
    drafted: Drafted,
    num_drafted_B: Tensor,
    rule: Rule,
    sampling: SamplingParams,
    uniforms: Uniforms | None,
    seen_BV: Tensor | None = None,
) -> Verdict:
    """Verify drafted tokens against the target's logits; arguments as in `JudgeRequest`."""
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
