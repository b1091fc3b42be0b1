"""Hands the target's raw logits, which vLLM overwrites, to its rejection samplers.

Raw logits are those before temperature, min-p, top-k and top-p, with what vLLM applies before:
penalties, `logit_bias`, `bad_words`, `allowed_token_ids` and `min_tokens`. vLLM's functions that
shape logits are replaced by ones that copy them at that place. The samplers get the shaped logits
as the same object, by which the copy is recognized.
"""

# N drafted tokens, or rows of logits; B requests
from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from paceline.core.sampling import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from paceline.core.rule_base import Rule

_GREEDY = SamplingParams(temperature=0)


class RawLogits:
    """The raw logits of one runner's batch, if the rule reads them there."""

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self._shaped: Tensor | None = None
        self._raw: Tensor | None = None
        self._is_shaping = False

    def take(self, shaped: Tensor) -> Tensor | None:
        """The raw logits of these; None: the rule does not read them, or nothing was shaped.

        Raises:
            RuntimeError: The rule reads them, and another function has shaped these.
        """
        found, raw = self._shaped, self._raw
        self._shaped = self._raw = None
        if found is not shaped and self._reads(any_greedy=True):
            raise RuntimeError(
                f"paceline: the rule {self._rule.name} reads the target's logits before top-k and "
                "top-p, and the sampler of this model does not hand them over; use the rule "
                "lossless, or unset PACELINE_RULE"
            )
        return raw if found is shaped else None

    def constraints(self, original: Callable[..., Tensor]) -> Any:
        """The first runner's `apply_sampling_constraints`, which overwrites the logits."""

        def apply_sampling_constraints(
            logits: Tensor, cu_num_draft_tokens: Tensor, sampling_metadata: Any
        ) -> Tensor:
            greedy, random = sampling_metadata.all_greedy, sampling_metadata.all_random
            reads = not greedy and self._reads(any_greedy=not random)
            self._raw = logits.clone() if reads else None
            self._shaped = original(logits, cu_num_draft_tokens, sampling_metadata)
            return self._shaped

        return apply_sampling_constraints

    def params(self, original: Callable[..., Tensor]) -> Any:
        """The second runner's `Sampler.apply_sampling_params`."""

        def apply_sampling_params(
            sampler: Any, logits: Tensor, *arguments: Any, skip_top_k_top_p: bool = False
        ) -> Tensor:
            if skip_top_k_top_p:  # for a step without drafts
                return original(sampler, logits, *arguments, skip_top_k_top_p=True)
            self._raw, self._is_shaping = None, True
            try:
                self._shaped = original(sampler, logits, *arguments)
            finally:
                self._is_shaping = False
            return self._shaped

        return apply_sampling_params

    def temperature(self, original: Callable[..., None]) -> Any:
        """The second runner's `SamplingStates.apply_temperature`: penalties were applied before."""

        def apply_temperature(
            states: Any, logits: Tensor, expanded_idx_mapping: Tensor, idx_mapping_np: Any
        ) -> None:
            if self._is_shaping and self._reads(any_greedy=states.any_greedy(idx_mapping_np)):
                self._raw = logits.clone()
            original(states, logits, expanded_idx_mapping, idx_mapping_np)

        return apply_temperature

    def _reads(self, *, any_greedy: bool) -> bool:
        return self._rule.uses_confidence or (any_greedy and self._rule.reads_raw(_GREEDY))


def expand_batch_to_tokens(
    x: Tensor,
    cu_num_tokens: Tensor,
    num_tokens: int,
    replace_from: int = 0,
    replace_to: int = 0,
) -> Tensor:
    """vLLM's function: a request's value for each of its tokens, [B] -> [num_tokens]."""
    ends = cu_num_tokens.to(torch.int64)
    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    expanded = x.repeat_interleave(counts, output_size=num_tokens)
    return torch.where(expanded == replace_from, replace_to, expanded).to(x.dtype)
