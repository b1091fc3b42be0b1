"""Logits to probabilities, for target and draft alike, and drawing from them.

Every probability that decoding or measurement uses is made here, in float32, so that a draft equal
to its target has equal probabilities to the last bit.
"""

# B batch, N positions, V vocabulary
from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from pydantic import Field
from torch import Tensor

from paceline.config import StrictModel
from paceline.core.backend import registered
from paceline.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

# Sums of more entries at a time cost more in fresh memory than in arithmetic.
_SUM_ENTRIES = 1 << 20
_COLDEST = torch.finfo(torch.float32).tiny


class SamplingParams(StrictModel):
    """How a distribution is shaped before a token is drawn; 0 for `top_k` means all tokens."""

    temperature: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    repetition_penalty: float = Field(default=1.0, gt=0, allow_inf_nan=False)

    @property
    def greedy(self) -> bool:
        """Temperature 0: all mass on the likeliest token."""
        return self.temperature == 0

    @property
    def only_temperature(self) -> bool:
        """Nothing but a temperature above 0 shapes the distribution, given the context."""
        return self.temperature > 0 and self.top_p == 1 and self.top_k == 0

    @property
    def untempered(self) -> bool:
        """The model's own distribution, given the context."""
        return self.temperature == 1 and self.only_temperature


UNTEMPERED = SamplingParams()
"""Confidences are read from this."""


def proposal_params(sampling: SamplingParams, draft: SamplingParams | None) -> SamplingParams:
    """How the draft's distributions are shaped; `draft` None: as the target's.

    A repetition penalty is part of the context that both models see, so it is always the target's.

    Raises:
        UsageError: `draft` sets another repetition penalty.
    """
    if draft is None:
        return sampling
    penalty = sampling.repetition_penalty
    if draft.repetition_penalty not in (1, penalty):
        raise UsageError(
            f"draft_sampling.repetition_penalty is {draft.repetition_penalty:g} and that of the target "
            f"{penalty:g}; leave it out: the target's penalty applies to both models"
        )
    return draft.model_copy(update={"repetition_penalty": penalty})


def to_probs(logits: Tensor, params: SamplingParams) -> Tensor:
    """The distribution that tokens are drawn from.

    Temperature first, then top-k, then top-p on what is left, then renormalised, the order of
    transformers and vLLM. The likeliest token always stays. Temperature 0 is one-hot at the first
    maximum. The repetition penalty needs the context: `apply_repetition_penalty` comes before.

    Shapes: logits [..., V] -> probs [..., V], float32.
    """
    logits = logits.float()
    if params.greedy:
        best = logits.argmax(-1, keepdim=True)
        return torch.zeros_like(logits).scatter_(-1, best, 1.0)
    if params.only_temperature and not logits.requires_grad:
        taken = registered().softmax(logits, params.temperature)
        if taken is not None:
            return taken
    scaled = logits if params.temperature == 1 else _scale(logits, params.temperature)
    if 0 < params.top_k < scaled.shape[-1]:
        scaled = _keep_top_k(scaled, params.top_k)
    probs = scaled.softmax(-1)
    if params.top_p == 1:
        return probs
    taken = None if probs.requires_grad else registered().keep_top_p(probs, params.top_p)
    return _keep_top_p(probs, params.top_p) if taken is None else taken


def _scale(logits: Tensor, temperature: float) -> Tensor:
    # The largest logit goes to 0 first, or a tiny temperature overflows to inf - inf; one that
    # float32 rounds to 0 would make 0 / 0 of it, hence the coldest.
    return (logits - logits.amax(-1, keepdim=True)) / max(temperature, _COLDEST)


def _keep_top_k(logits: Tensor, k: int) -> Tensor:
    """Exactly k tokens stay, ties broken by the sort, never k and its equals."""
    kept = logits.topk(k, dim=-1).indices
    mask = torch.ones_like(logits, dtype=torch.bool).scatter(-1, kept, value=False)
    return logits.masked_fill(mask, -torch.inf)


def _keep_top_p(probs: Tensor, top_p: float) -> Tensor:
    """The smallest set of likeliest tokens whose mass reaches top_p."""
    ordered, indices = probs.sort(dim=-1, descending=True, stable=True)
    mass_before = ordered.cumsum(-1) - ordered
    keep = mass_before < top_p
    keep[..., 0] = True
    kept = torch.zeros_like(probs).scatter(-1, indices, ordered * keep)
    return kept / kept.sum(-1, keepdim=True)


def apply_repetition_penalty(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Divide positive logits of seen tokens by the penalty, multiply negative ones (CTRL).

    Shapes: logits [..., V], seen bool, broadcast to it -> [..., V], float32.
    Paper: Keskar et al. 2019, section 4.1. Differs: negative logits are multiplied, as in
    transformers, so that a penalty above 1 always lowers the token.
    """
    logits = logits.float()
    if penalty == 1:
        return logits
    penalised = torch.where(logits > 0, logits / penalty, logits * penalty)
    return torch.where(seen, penalised, logits)


def seen_tokens(texts: Sequence[Sequence[int]], vocab_size: int) -> Tensor:
    """Which tokens each text holds, for the repetition penalty, bool [B, V]."""
    seen_BV = torch.zeros(len(texts), vocab_size, dtype=torch.bool)
    for row, text in enumerate(texts):
        seen_BV[row, list(text)] = True
    return seen_BV


def mark_seen(tokens_BN: Tensor, seen_BV: Tensor) -> Tensor:
    """What has been seen before each position of a block and before the one after it.

    Shapes: tokens [B, N], seen at the block's start [B, V] -> bool [B, N + 1, V].
    """
    num_new = tokens_BN.shape[1]
    seen = seen_BV[:, None].repeat(1, num_new + 1, 1)
    for position in range(num_new):
        index = tokens_BN[:, position, None, None].expand(-1, num_new - position, 1)
        seen[:, position + 1 :].scatter_(-1, index, value=True)
    return seen


def likeliest(logits: Tensor) -> Tensor:
    """The token that temperature 0 takes: the first of the largest logits, [..., V] -> [...]."""
    taken = registered().likeliest(logits)
    return logits.argmax(-1) if taken is None else taken


def sample(probs_BV: Tensor, uniforms_B: Tensor) -> Tensor:
    """Draw one token a row by inverse CDF: one uniform in [0, 1) a draw, [B].

    A token of probability 0 is never drawn: the sum runs in float64 and the uniform is scaled to
    the row's own total.
    """
    taken = registered().sample(probs_BV, uniforms_B)
    if taken is not None:
        return taken
    rows = max(1, _SUM_ENTRIES // probs_BV.shape[-1])
    parts = zip(torch.split(probs_BV, rows), torch.split(uniforms_B, rows), strict=True)
    return torch.cat([_sample(probs_RV, uniforms_R) for probs_RV, uniforms_R in parts])


def _sample(probs_BV: Tensor, uniforms_B: Tensor) -> Tensor:
    cdf_BV = probs_BV.cumsum(-1, dtype=torch.float64)
    points_B1 = uniforms_B.to(cdf_BV).unsqueeze(-1) * cdf_BV[..., -1:]
    # Rounding can lift the point onto the total: then the first entry that reaches it is meant.
    below_B1 = cdf_BV[..., -1:].nextafter(cdf_BV.new_zeros(()))
    # The first entry above the point adds to the sum, so its token has mass.
    return torch.searchsorted(cdf_BV, torch.minimum(points_B1, below_B1), right=True).squeeze(-1)
