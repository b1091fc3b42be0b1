"""What a draft costs before anybody knows how well it agrees: its passes, and what they ask for."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from paceline.core.lists import as_list
from paceline.core.sampling import SamplingParams
from paceline.core.speed import break_even_acceptance
from paceline.measure.latency import PassTimer
from paceline.models import prepare_for_decoding

if TYPE_CHECKING:
    from paceline.models.hf.causal import CausalModel

_GAMMAS = (1, 2, 3, 4, 5)
_REPEATS = 20
_CONTEXT = 32  # tokens before the passes that are timed


class DraftCost(NamedTuple):
    """Of one draft beside its target, on this machine.

    Attributes:
        parameter_ratio: Draft parameters / target parameters, tied ones once.
        cost_ratio: Draft pass / target pass, one token each.
        break_even: By gamma, the acceptance from which a block gains; inf: none suffices.
    """

    parameter_ratio: float
    cost_ratio: float
    break_even: dict[int, float]

    @property
    def easiest(self) -> tuple[int, float]:
        """The gamma that pays first, and from which acceptance on."""
        return min(self.break_even.items(), key=lambda item: item[1])

    def __str__(self) -> str:
        gamma, acceptance = self.easiest
        cost = f"in Paceline's decoder a pass costs {self.cost_ratio:.2f} of the target's"
        if math.isinf(acceptance):
            return f"{cost}; it never pays"
        return f"{cost}; it pays from an acceptance of {acceptance:.2f} (gamma {gamma})"


@torch.inference_mode()
def time_draft(target: CausalModel, draft: CausalModel, *, seed: int = 0) -> DraftCost:
    """Time both as they are decoded with, behind a context of arbitrary tokens."""
    share = draft.num_parameters / target.num_parameters
    served, ready = prepare_for_decoding(target), prepare_for_decoding(draft)
    rng = torch.Generator().manual_seed(seed)
    halves = [size // 2 for size in (target.max_length, draft.max_length) if size]
    drawn = torch.randint(target.vocab_size, (max(1, min([_CONTEXT, *halves])),), generator=rng)
    context = as_list(drawn)
    timer = PassTimer(served, ready, context, _GAMMAS, SamplingParams())
    for _ in range(_REPEATS):
        timer.time_once()
    costs = timer.costs()
    break_even = {
        gamma: break_even_acceptance(
            gamma, costs.drafting_cost_ratio(gamma), costs.block_cost_ratio(gamma)
        )
        for gamma in _GAMMAS
    }
    return DraftCost(share, costs.cost_ratio, break_even)
