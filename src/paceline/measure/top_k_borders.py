"""Tokens at the border of top-k and top-p, which rounding may let in or keep out.

Passes of different shapes, and models in fewer bits, give logits that differ a little. Tokens whose
logits nearly tie may then change places in the order that top-k and top-p cut.
"""

# T positions, V vocabulary
from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from paceline.core.sampling import SamplingParams

# What a running sum of probabilities in float32 may be off by.
_SUM_ERROR = 1e-6


def kept_tokens(
    logits_TV: Tensor, params: SamplingParams, tolerance: float
) -> tuple[Tensor, Tensor]:
    """Which tokens the sampler keeps in any case, and which it may keep.

    `tolerance`: two logits closer than this may change places, and a token's odds may be off by a
    factor of exp(tolerance / temperature). Tokens of the second set that are not in the first stand
    at the border.

    Shapes: logits [T, V], the repetition penalty applied -> bool [T, V] each.
    """
    vocab_size = logits_TV.shape[-1]
    temperature = params.temperature or 1.0
    most = 1 if params.greedy else params.top_k or vocab_size
    scaled_TV = logits_TV.double() / temperature
    slack = tolerance / temperature
    ordered_TV = scaled_TV.sort(-1).values
    surely_ahead_TV = vocab_size - torch.searchsorted(ordered_TV, scaled_TV + slack, right=True)
    # but for the token itself
    maybe_ahead_TV = vocab_size - torch.searchsorted(ordered_TV, scaled_TV - slack) - 1
    sure_TV, possible_TV = maybe_ahead_TV < most, surely_ahead_TV < most
    if params.greedy or params.top_p == 1:
        return sure_TV, possible_TV
    likeliest_TV = ordered_TV.flip(-1)
    likeliest_TV[:, most:] = -torch.inf
    mass_TV = torch.nn.functional.pad(likeliest_TV.softmax(-1).cumsum(-1), (1, 0))
    odds = torch.tensor(slack, dtype=torch.float64).exp()
    least_TV = _at_odds(mass_TV.gather(-1, surely_ahead_TV), 1 / odds) - _SUM_ERROR
    most_TV = _at_odds(mass_TV.gather(-1, maybe_ahead_TV), odds) + _SUM_ERROR
    # the likeliest token stays, whatever its mass
    sure_TV &= (maybe_ahead_TV == 0) | (most_TV < params.top_p)
    possible_TV &= (surely_ahead_TV == 0) | (least_TV < params.top_p)
    return sure_TV, possible_TV


def _at_odds(mass: Tensor, odds: Tensor) -> Tensor:
    """The mass if its odds against the rest were that much larger."""
    return mass * odds / (mass * odds + (1 - mass).clamp(min=0)).clamp(min=1e-300)
