"""Convert logits to probabilities, sample tokens, and restrict logits to part of the vocabulary.

Target and draft share this code, in float32: a draft equal to its target has bit-identical
probabilities.
"""

# B batch, N positions, V vocabulary, K tokens of a subset
from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from pydantic import Field
from torch import Tensor

from paceline.core.backend import registered
from paceline.errors import UsageError
from paceline.strict_models import StrictModel

if TYPE_CHECKING:
    from collections.abc import Sequence

# Entries summed at a time; for larger tensors allocation costs more than arithmetic.
_SUM_ENTRIES = 1 << 20
BANNED_LOGIT = -1e4
"""Logit of a token that a model may not emit, in training: probability 0 with a finite log."""

_COLDEST = torch.finfo(torch.float32).tiny


class SamplingParams(StrictModel):
    """Sampling parameters, as in transformers and vLLM; `top_k` 0 disables top-k."""

    temperature: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    repetition_penalty: float = Field(default=1.0, gt=0, allow_inf_nan=False)

    @property
    def name(self) -> str:
        """Short name, such as `t0.6 p0.9`; values that change nothing are left out."""
        parts = [f"t{self.temperature:g}"]
        if self.top_p < 1:
            parts.append(f"p{self.top_p:g}")
        if self.top_k:
            parts.append(f"k{self.top_k}")
        if self.repetition_penalty != 1:
            parts.append(f"r{self.repetition_penalty:g}")
        return " ".join(parts)

    @property
    def setting(self) -> dict[str, float]:
        """The temperature, and what else changes something, by name."""
        off = {"top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0}
        values: dict[str, float] = self.model_dump()
        return {name: value for name, value in values.items() if off.get(name) != value}

    @property
    def greedy(self) -> bool:
        """True at temperature 0: the most likely token has probability 1."""
        return self.temperature == 0

    @property
    def only_temperature(self) -> bool:
        """True if the temperature is above 0 and top-k and top-p are off."""
        return self.temperature > 0 and self.top_p == 1 and self.top_k == 0

    @property
    def untempered(self) -> bool:
        """True if the distribution is the softmax of the logits."""
        return self.temperature == 1 and self.only_temperature


UNTEMPERED = SamplingParams()
"""The parameters for confidences."""


def proposal_params(sampling: SamplingParams, draft: SamplingParams | None) -> SamplingParams:
    """The draft's sampling parameters; `draft` None: the target's.

    The target's repetition penalty applies to both models.

    Raises:
        UsageError: `draft` sets another repetition penalty.
    """
    if draft is None:
        return sampling
    penalty = sampling.repetition_penalty
    if draft.repetition_penalty not in (1, penalty):
        raise UsageError(
            f"draft_sampling.repetition_penalty is {draft.repetition_penalty:g} but the target's "
            f"is {penalty:g}; leave it out: the target's penalty applies to both models"
        )
    return draft.model_copy(update={"repetition_penalty": penalty})


def to_probs(logits: Tensor, params: SamplingParams) -> Tensor:
    """Apply temperature, top-k, top-p and softmax, in the order of transformers and vLLM.

    The most likely token is never filtered out. Temperature 0 gives a one-hot at the first maximum.
    Call `apply_repetition_penalty` before: it needs the context.

    Shapes: logits [..., V] -> probs [..., V], float32.
    """
    logits = logits.float()
    if params.greedy:
        best = logits.argmax(-1, keepdim=True)
        return torch.zeros_like(logits).scatter_(-1, best, 1.0)
    if params.only_temperature and not logits.requires_grad:
        result = registered().softmax(logits, params.temperature)
        if result is not None:
            return result
    scaled = logits if params.temperature == 1 else _scale(logits, params.temperature)
    if 0 < params.top_k < scaled.shape[-1]:
        scaled = _keep_top_k(scaled, params.top_k)
    probs = scaled.softmax(-1)
    if params.top_p == 1:
        return probs
    result = None if probs.requires_grad else registered().keep_top_p(probs, params.top_p)
    return _keep_top_p(probs, params.top_p) if result is None else result


def _scale(logits: Tensor, temperature: float) -> Tensor:
    # Subtract the maximum first: small temperatures would overflow to inf - inf. The lower limit
    # avoids 0 / 0 at temperatures that float32 rounds to 0.
    return (logits - logits.amax(-1, keepdim=True)) / max(temperature, _COLDEST)


def _keep_top_k(logits: Tensor, k: int) -> Tensor:
    """Keep exactly k tokens, also in case of ties."""
    kept = logits.topk(k, dim=-1).indices
    mask = torch.ones_like(logits, dtype=torch.bool).scatter(-1, kept, value=False)
    return logits.masked_fill(mask, -torch.inf)


def _keep_top_p(probs: Tensor, top_p: float) -> Tensor:
    """Keep the smallest set of most likely tokens whose mass reaches top_p."""
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
    """Mask of the tokens in each text, for the repetition penalty, bool [B, V]."""
    seen_BV = torch.zeros(len(texts), vocab_size, dtype=torch.bool)
    for row, text in enumerate(texts):
        seen_BV[row, list(text)] = True
    return seen_BV


def mark_seen(tokens_BN: Tensor, seen_BV: Tensor) -> Tensor:
    """Mask of the tokens seen before each position of a block and before the one after it.

    Shapes: tokens [B, N], seen at the block's start [B, V] -> bool [B, N + 1, V].
    """
    num_new = tokens_BN.shape[1]
    seen = seen_BV[:, None].repeat(1, num_new + 1, 1)
    for position in range(num_new):
        index = tokens_BN[:, position, None, None].expand(-1, num_new - position, 1)
        seen[:, position + 1 :].scatter_(-1, index, value=True)
    return seen


def likeliest(logits: Tensor) -> Tensor:
    """The token of greedy decoding: the first of the largest logits, [..., V] -> [...]."""
    result = registered().likeliest(logits)
    return logits.argmax(-1) if result is None else result


def sample(probs_BV: Tensor, uniforms_B: Tensor) -> Tensor:
    """Draw one token per row by inverse CDF, with one uniform in [0, 1) each. -> [B].

    Sums in float64 and scales the uniform to the row's sum, so that a token of probability 0 is
    never drawn.
    """
    assert len(probs_BV) == len(uniforms_B), "one uniform a row"
    result = registered().sample(probs_BV, uniforms_B)
    if result is not None:
        return result
    rows = max(1, _SUM_ENTRIES // probs_BV.shape[-1])
    parts = zip(torch.split(probs_BV, rows), torch.split(uniforms_B, rows), strict=True)
    return torch.cat([_sample(probs_RV, uniforms_R) for probs_RV, uniforms_R in parts])


def _sample(probs_BV: Tensor, uniforms_B: Tensor) -> Tensor:
    cdf_BV = probs_BV.cumsum(-1, dtype=torch.float64)
    points_B1 = uniforms_B.to(cdf_BV).unsqueeze(-1) * cdf_BV[..., -1:]
    # Rounding can lift the point to the total: take the first entry that reaches the total.
    below_B1 = cdf_BV[..., -1:].nextafter(cdf_BV.new_zeros(()))
    # The first entry above the point adds to the sum, so its token has mass.
    found_B1 = torch.searchsorted(cdf_BV, torch.minimum(points_B1, below_B1), right=True)
    return found_B1.squeeze(-1).clamp(max=cdf_BV.shape[-1] - 1)  # NaN is beyond the last


def spread(logits: Tensor, tokens_K: Tensor, vocab_size: int) -> Tensor:
    """Logits of the subset as logits of all tokens, -inf elsewhere. [..., K] -> [..., V]."""
    whole = logits.new_full((*logits.shape[:-1], vocab_size), -torch.inf)
    return whole.index_copy_(-1, tokens_K, logits)


def limited(logits: Tensor, tokens_K: Tensor) -> Tensor:
    """Logits of all tokens, set to -inf outside of the subset, [..., V]."""
    return spread(logits[..., tokens_K], tokens_K, logits.shape[-1])


def as_list(values: Tensor) -> list[Any]:
    """Nested lists of plain numbers, which are faster than tensors for a few rows."""
    return values.tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
