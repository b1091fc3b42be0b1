"""Finds tokens at the border of top-k and top-p, whose membership depends on rounding.

Logits depend slightly on the shape of the pass and on the data type. Tokens with nearly equal
logits may therefore swap ranks in the order that top-k and top-p cut.
"""

# T positions, V vocabulary
from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from paceline.core.sampling import SamplingParams

_SUM_ERROR = 1e-6  # maximum error of a running sum of probabilities in float32


def kept_tokens(
    logits_TV: Tensor, params: SamplingParams, tolerance: float
) -> tuple[Tensor, Tensor]:
    """Tokens that the sampler certainly keeps, and tokens that it may keep.

    Tokens at the border are in the second set only. `tolerance`: logits closer than this may swap
    ranks, and the odds of a token may be off by a factor of exp(tolerance / temperature).

    Shapes: logits [T, V], the repetition penalty applied -> bool [T, V] each.
    """
    vocab_size = logits_TV.shape[-1]
    temperature = params.temperature or 1.0
    most = 1 if params.greedy else params.top_k or vocab_size
    scaled_TV = logits_TV.double() / temperature
    slack = tolerance / temperature
    ordered_TV = scaled_TV.sort(-1).values
    surely_ahead_TV = vocab_size - torch.searchsorted(ordered_TV, scaled_TV + slack, right=True)
    # - 1: the token itself
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
    # the most likely token is always kept
    sure_TV &= (maybe_ahead_TV == 0) | (most_TV < params.top_p)
    possible_TV &= (surely_ahead_TV == 0) | (least_TV < params.top_p)
    return sure_TV, possible_TV


def _at_odds(mass: Tensor, odds: Tensor) -> Tensor:
    """The probability whose odds are `odds` times those of `mass`."""
    return mass * odds / (mass * odds + (1 - mass).clamp(min=0)).clamp(min=1e-300)
