"""Times a draft's forward passes and derives the acceptance that the draft needs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from paceline.core.sampling import SamplingParams, as_list
from paceline.core.speed import break_even_acceptance
from paceline.measure.latency import PassTimer
from paceline.models import prepare_for_decoding

if TYPE_CHECKING:
    from paceline.models.hf.base import HfModel

_GAMMAS = (1, 2, 3, 4, 5)
_REPEATS = 20
_CONTEXT = 32  # tokens before the timed passes


class DraftCost(NamedTuple):
    """Cost of a draft relative to its target, on this machine.

    Attributes:
        parameter_ratio: Draft parameters / target parameters; tied ones are counted once.
        cost_ratio: Seconds of a draft pass / a target pass, one token each.
        break_even: Acceptance above which a block is faster than plain decoding, by gamma; inf if
            there is none.
    """

    parameter_ratio: float
    cost_ratio: float
    break_even: dict[int, float]

    @property
    def easiest(self) -> tuple[int, float]:
        """The gamma with the lowest break-even acceptance, and that acceptance."""
        return min(self.break_even.items(), key=lambda item: item[1])

    def __str__(self) -> str:
        gamma, acceptance = self.easiest
        cost = f"in Paceline's decoder a pass costs {self.cost_ratio:.2f} of the target's"
        if math.isinf(acceptance):
            return f"{cost}; it never breaks even"
        return f"{cost}; it breaks even at an acceptance of {acceptance:.2f} (gamma {gamma})"


@torch.inference_mode()
def time_draft(target: HfModel, draft: HfModel, *, seed: int = 0) -> DraftCost:
    """Time both models, prepared for decoding, after a context of random tokens."""
    share = draft.num_parameters / target.num_parameters
    served, ready = prepare_for_decoding(target), prepare_for_decoding(draft)
    rng = torch.Generator().manual_seed(seed)
    halves = [size // 2 for size in (target.max_length, draft.max_length) if size]
    drawn = torch.randint(target.vocab_size, (max(1, min([_CONTEXT, *halves])),), generator=rng)
    context = as_list(drawn)
    costs = PassTimer(served, ready, context, _GAMMAS, SamplingParams()).run(_REPEATS)
    break_even = {
        gamma: break_even_acceptance(
            gamma, costs.drafting_cost_ratio(gamma), costs.block_cost_ratio(gamma)
        )
        for gamma in _GAMMAS
    }
    return DraftCost(share, costs.cost_ratio, break_even)
