"""How each engine draws the drafts of a request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core.sampling import SamplingParams

if TYPE_CHECKING:
    from paceline.engines.commands import DraftSampling, EngineName

_GREEDY = SamplingParams(temperature=0.0)


def proposals_of(
    engine: EngineName, drafting: DraftSampling, sampling: SamplingParams
) -> SamplingParams:
    """The distribution that drafts come from.

    transformers hands the target's processors to the draft, whose own generate adds them again, so the
    temperature divides its logits twice. vLLM's probabilistic drafts know the temperature alone.

    Args:
        engine: What drafts.
        drafting: How it was told to; of meaning for vLLM only.
        sampling: Of the request.
    """
    if engine == "transformers":
        return sampling.model_copy(update={"temperature": sampling.temperature**2})
    if drafting == "probabilistic":
        return SamplingParams(temperature=sampling.temperature)
    return _GREEDY
