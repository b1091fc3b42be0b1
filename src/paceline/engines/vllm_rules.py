"""Acceptance rules on the tensors of vLLM's sampler.

`rejection_sample` computes what vLLM's function of this name does, under a rule. Requests at
temperature 0 keep drafts that are the target's argmax under cascades; `lenient` and `lossy` compare
the target's probabilities alone, as in the decoder. The bonus token follows the target, because no
draft probabilities exist behind the last draft.

Confidences, and the target that `lenient` and `lossy` compare at temperature 0, are those of the
logits before temperature, min-p, top-k and top-p, with penalties, as in the decoder.

Nothing here copies values to the host. This module needs torch alone.

Paper: Narasimhan et al. 2024, algorithm 4 (speculative cascades).
"""

# N drafted tokens, or rows of logits; B requests, K drafts per request, V vocabulary
from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.core.rule_base import Position
from paceline.core.sampling import SamplingParams

if TYPE_CHECKING:
    from paceline.core.rule_base import Rule

GREEDY = SamplingParams(temperature=0)
_UNUSED = -1  # vLLM's mark of positions behind the last token, and of drafts that are not valid
_ACCEPT, _DRAW = 1, 2  # streams of random numbers
_GOLDEN = -7046029254386353131  # constants of splitmix64, as signed numbers
_FIRST, _SECOND = -4658895280553007687, -7723592293110705685


class _Rows(NamedTuple):
    """Drafted tokens and logits in rows, one for each position.

    Attributes:
        target_NV: The target's logits, tempered and filtered; untempered at temperature 0.
        draft_NV: The draft's logits at temperature 1, up to a constant; None: it drafts greedily.
        drafted_N: Drafted tokens; -1: not valid.
        temperature_N: 0: greedy.
        raw_NV: The target's logits, untempered and unfiltered; None: no filter is set.
    """

    target_NV: Tensor
    draft_NV: Tensor | None
    drafted_N: Tensor
    temperature_N: Tensor
    raw_NV: Tensor | None

    def at(self, rows: Tensor) -> _Rows:
        """The rows with these indices."""
        return _Rows(*(None if part is None else part[rows] for part in self))  # pyright: ignore[reportArgumentType]

    @property
    def is_greedy(self) -> Tensor:
        return self.temperature_N == 0

    def position(self, rule: Rule) -> Position:
        """Probabilities of both models; greedy rows have some at temperature 1."""
        temperature_N1 = torch.where(self.is_greedy, 1.0, self.temperature_N)[:, None]
        target = self.target_NV.softmax(-1, dtype=torch.float32)
        if self.draft_NV is None:
            draft = F.one_hot(self.drafted_N.clamp(min=0), self.target_NV.shape[-1]).to(target)
            draft_raw = draft
        else:
            draft = (self.draft_NV / temperature_N1).softmax(-1, dtype=torch.float32)
            draft_raw = draft
            if rule.uses_confidence:
                draft_raw = self.draft_NV.softmax(-1, dtype=torch.float32)
        target_raw = target
        if rule.uses_confidence:
            raw_NV = self.target_NV * temperature_N1 if self.raw_NV is None else self.raw_NV
            target_raw = raw_NV.softmax(-1, dtype=torch.float32)
        return Position(target, draft, target_raw, draft_raw)


def rejection_sample(
    rule: Rule,
    target_logits: Tensor,
    draft_logits: Tensor | None,
    draft_sampled: Tensor,
    cu_num_logits: Tensor,
    pos: Tensor,
    expanded_idx_mapping: Tensor,
    expanded_local_pos: Tensor,
    temperature: Tensor,
    seed: Tensor,
    num_speculative_steps: int,
    *,
    raw_logits: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`vllm.v1.worker.gpu.spec_decode.rejection_sampler.rejection_sample` under a rule.

    A request with n drafts has n + 1 rows of target logits; row i judges `draft_sampled[i + 1]`,
    and the last row is for the bonus token.

    Shapes: target logits [N, V] (tempered, filtered), `raw_logits` the same (before both; None: no
    filter), draft logits [max_requests, K, V] (untempered), `draft_sampled`, `pos`,
    `expanded_idx_mapping` (a request's place in the tensors of all requests) and
    `expanded_local_pos` (0, 1, ... within a request) [N], `cu_num_logits` [B + 1], `temperature`
    and `seed` [max_requests] -> tokens [B, K + 1] int64 and their numbers [B] int32.
    """
    num_rows, width = target_logits.shape
    if draft_logits is not None:
        width = min(width, draft_logits.shape[-1])  # without padding
    device = target_logits.device
    bounds = cu_num_logits.to(torch.int64)
    row_N = torch.arange(num_rows, device=device)
    request_N = torch.searchsorted(bounds[1:], row_N, right=True)
    counts_B = bounds[1:] - bounds[:-1] - 1
    places_N = expanded_idx_mapping.to(torch.int64)
    drafted_N = torch.cat([draft_sampled[1:], draft_sampled[:1]]).to(torch.int64)
    draft_NV = None
    if draft_logits is not None:
        step_N = expanded_local_pos.to(torch.int64).clamp(max=num_speculative_steps - 1)
        draft_NV = draft_logits[places_N, step_N, :width].float()
    raw_NV = None if raw_logits is None else raw_logits[:, :width]
    target_NV = target_logits[:, :width].float()
    rows = _Rows(target_NV, draft_NV, drafted_N, temperature[places_N], raw_NV)
    uniform_N = _counted_uniforms(seed[places_N], pos, _ACCEPT, 1)[:, 0]
    behind_N = row_N == bounds[1:][request_N] - 1  # rows of bonus tokens
    accepted_N = _accepted(rule, rows, uniform_N) & ~behind_N
    place_BK = torch.arange(num_speculative_steps, device=accepted_N.device)
    index_BK = (bounds[:-1, None] + place_BK).clamp(max=len(drafted_N) - 1)
    accepted_BK = accepted_N[index_BK] & (place_BK < counts_B[:, None])
    # drafts before the first rejection of each request
    kept_B, drafted_BK = accepted_BK.long().cumprod(-1).sum(-1), drafted_N[index_BK]

    row_B = bounds[:-1] + kept_B
    last = rows.at(row_B)
    judged_B = (kept_B < counts_B) & (last.drafted_N >= 0)
    uniforms_BV = _counted_uniforms(seed[places_N[row_B]], pos[row_B], _DRAW, width)
    next_B = _drawn(rule, last, judged_B, -uniforms_BV.log())
    return _output(drafted_BK, kept_B, next_B), (kept_B + 1).to(torch.int32)


def _accepted(rule: Rule, rows: _Rows, uniform_N: Tensor) -> Tensor:
    """Which drafts are kept, each judged by itself."""
    drafted_N1 = rows.drafted_N.clamp(min=0)[:, None]
    position = rows.position(rule)
    if rule.entrywise and not rule.uses_confidence:
        position = Position.of(*(values.gather(-1, drafted_N1) for values in position[:2]))
        chance_N = rule.accept_at(position)[:, 0]
    else:
        chance_N = rule.accept_at(position).gather(-1, drafted_N1)[:, 0]
    kept_N = torch.where(rows.is_greedy, _kept_greedily(rule, rows), uniform_N < chance_N)
    return kept_N & (rows.drafted_N >= 0)


def _kept_greedily(rule: Rule, rows: _Rows) -> Tensor:
    """Which drafts are kept at temperature 0."""
    best_N = rows.target_NV.argmax(-1)
    if rule.uses_confidence or not rule.reads_raw(GREEDY):
        return rows.drafted_N == best_N
    drafted_N = rows.drafted_N.clamp(min=0)
    raw_NV = rows.target_NV if rows.raw_NV is None else rows.raw_NV
    target_raw = raw_NV.softmax(-1, dtype=torch.float32)
    one_hots = (F.one_hot(tokens, target_raw.shape[-1]) for tokens in (best_N, drafted_N))
    target, draft = (one_hot.to(target_raw) for one_hot in one_hots)
    accepted = rule.accept_at(Position.of(target, draft, target_raw))
    return accepted.gather(-1, drafted_N[:, None])[:, 0] == 1


def _drawn(rule: Rule, rows: _Rows, judged_B: Tensor, noise_BV: Tensor) -> Tensor:
    """One token per request: recovered where its draft was rejected, else from the target.

    `noise_BV`: exponential random numbers; the token with the smallest noise / probability is a
    sample.
    """
    position = rows.position(rule)
    recovered = rule.residual_at(position)
    probs_BV = torch.where(judged_B[:, None], recovered, position.target)
    drawn_B = (probs_BV.to(noise_BV) / noise_BV).argmax(-1)
    return torch.where(rows.is_greedy, rows.target_NV.argmax(-1), drawn_B)


def _output(drafted_BK: Tensor, kept_B: Tensor, next_B: Tensor) -> Tensor:
    """Kept drafts, the next token, and -1 behind it, [B, K + 1]."""
    place = torch.arange(drafted_BK.shape[1] + 1, device=kept_B.device)
    tokens = F.pad(drafted_BK, (0, 1), value=_UNUSED)
    tokens = torch.where(place < kept_B[:, None], tokens, _UNUSED)
    return torch.where(place == kept_B[:, None], next_B[:, None], tokens)


def _counted_uniforms(seed_N: Tensor, count_N: Tensor, stream: int, width: int) -> Tensor:
    """Uniform numbers in (0, 1) that depend on seed, count, stream and column alone, [N, width].

    splitmix64 of a hash of the four; 53 bits in float64.
    """
    seed_N = seed_N.to(torch.int64)
    key_N = _mixed(_mixed(seed_N + _GOLDEN * torch.full_like(seed_N, stream)) + count_N)
    columns = torch.arange(1, width + 1, device=seed_N.device)
    bits = _mixed(key_N[:, None] + columns * _GOLDEN)
    return (_shifted(bits, 11).double() + 0.5) * 2.0**-53


def _mixed(x: Tensor) -> Tensor:
    x = (x ^ _shifted(x, 30)) * _FIRST
    x = (x ^ _shifted(x, 27)) * _SECOND
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, count: int) -> Tensor:
    """A logical shift to the right."""
    return (x >> count) & ((1 << (64 - count)) - 1)
