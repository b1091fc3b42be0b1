"""Draft distribution of each engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core.sampling import SamplingParams

if TYPE_CHECKING:
    from paceline.engines.commands import DraftSampling, EngineName

_GREEDY = SamplingParams(temperature=0.0)


def proposals_of(
    engine: EngineName, drafting: DraftSampling, sampling: SamplingParams
) -> SamplingParams:
    """Sampling parameters that the engine applies to the draft.

    transformers passes the target's logits processors to the draft, whose own `generate` adds them
    again: logits are divided by the temperature twice. vLLM's probabilistic drafting applies the
    temperature, but neither top-k nor top-p.

    Args:
        engine: The engine that drafts.
        drafting: Its draft sampling; used for vLLM only.
        sampling: Sampling parameters of the request.
    """
    if engine == "transformers":
        return sampling.model_copy(update={"temperature": sampling.temperature**2})
    if drafting == "probabilistic":
        return SamplingParams(temperature=sampling.temperature)
    return _GREEDY
