"""G-test that sampled tokens follow a stated distribution, pooled over all contexts.

In each context, tokens are sorted by q/p, most over-proposed by the draft first, and pooled into
cells of equal target mass; tokens on a cell border are split at random in proportion. If the text
follows the target p, all cells are equally likely; if it follows the draft q, the first cells are
over-represented. Rare tokens do not cause cells with small expected counts.
"""

# T positions, V vocabulary, K cells
from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable


def equal_mass_cells(
    p_TV: Tensor, q_TV: Tensor, tokens_T: Tensor, num_cells: int, *, rng: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Cells of the tokens, and whether p gives them a positive probability. -> [T], bool [T].

    Sorted tokens partition [0, 1] into intervals of length p(v); `rng` draws a point in each
    token's interval. Under p the points are uniform on [0, 1].
    """
    p_TV, q_TV = p_TV.double().cpu(), q_TV.double().cpu()
    order_TV = q_TV / p_TV.clamp(min=1e-300)
    index_T1 = tokens_T[:, None]
    own_T1 = order_TV.gather(-1, index_T1)
    numbers_V = torch.arange(p_TV.shape[-1])
    before_TV = (order_TV > own_T1) | ((order_TV == own_T1) & (numbers_V < index_T1))
    mass_before_T = (p_TV * before_TV).sum(-1)
    p_T = p_TV.gather(-1, index_T1).squeeze(-1)
    uniforms_T = torch.rand(len(tokens_T), generator=rng, dtype=torch.float64)
    points_T = mass_before_T + uniforms_T * p_T
    cells_T = (points_T * num_cells).long().clamp(max=num_cells - 1)
    return cells_T, p_T > 0


def g_test(counts_K: Tensor) -> tuple[float, float]:
    """G = 2 sum O ln(O/E) against equal cells, and its chi-square p-value, K - 1 degrees.

    Raises:
        UsageError: fewer than 5 expected per cell, too few for the chi-square approximation.
    """
    total, num_cells = int(counts_K.sum()), len(counts_K)
    expected = total / num_cells
    if expected < 5:
        raise UsageError(
            f"got {total} tokens for {num_cells} cells, wanted at least {5 * num_cells}; "
            "use more prompts or more new tokens"
        )
    observed = counts_K.double()
    terms = torch.where(observed > 0, observed * (observed / expected).log(), 0.0)
    g = 2 * float(terms.sum())
    half_degrees = torch.tensor((num_cells - 1) / 2, dtype=torch.float64)
    p_value = torch.igammac(half_degrees, torch.tensor(max(g, 0.0) / 2, dtype=torch.float64))
    return g, float(p_value)


def mass_in_cells(p_TV: Tensor, q_TV: Tensor, num_cells: int) -> Tensor:
    """Probability of each cell of `equal_mass_cells` for a token drawn from q. -> [T, K].

    q is renormalised to the tokens that p gives a positive probability.
    """
    p_TV, q_TV = p_TV.double().cpu(), q_TV.double().cpu()
    q_TV = q_TV * (p_TV > 0)
    q_TV = q_TV / q_TV.sum(-1, keepdim=True).clamp(min=1e-300)
    order_TV = (q_TV / p_TV.clamp(min=1e-300)).argsort(dim=-1, descending=True, stable=True)
    p_TV, q_TV = p_TV.gather(-1, order_TV), q_TV.gather(-1, order_TV)
    ends_TV, sums_TV = p_TV.cumsum(-1), q_TV.cumsum(-1)
    borders_TK = (torch.arange(1, num_cells, dtype=torch.float64) / num_cells).repeat(len(p_TV), 1)
    at_TK = torch.searchsorted(ends_TV, borders_TK).clamp(max=p_TV.shape[-1] - 1)
    own_TK = p_TV.gather(-1, at_TK)
    # a token on a border is divided in proportion
    beyond_TK = ((ends_TV.gather(-1, at_TK) - borders_TK) / own_TK.clamp(min=1e-300)).clamp(0, 1)
    below_TK = sums_TV.gather(-1, at_TK) - beyond_TK * q_TV.gather(-1, at_TK)
    zero_T1 = torch.zeros(len(p_TV), 1, dtype=torch.float64)
    return torch.cat([zero_T1, below_TK, zero_T1 + 1], -1).diff()


def tokens_to_reject(shares_K: Tensor, false_alarm: float, power: float = 0.95) -> float:
    """How many tokens with these shares of the cells the G-test rejects with probability `power`.

    G of n tokens then follows a noncentral chi-square distribution of noncentrality
    2 n sum s ln(K s). Equal shares give infinity.
    """
    shares_K = shares_K.double()
    effect = 2 * float(torch.xlogy(shares_K, len(shares_K) * shares_K).sum())
    if effect < 1e-12:  # rounding
        return math.inf
    half_degrees = (len(shares_K) - 1) / 2

    def survival(g: float, noncentrality: float) -> float:
        """P(G > g): a Poisson mixture of chi-square distributions."""
        mean = noncentrality / 2
        most = int(mean + 12 * math.sqrt(mean) + 30)
        numbers_J = torch.arange(most, dtype=torch.float64)
        weights_J = (torch.xlogy(numbers_J, mean) - mean - (numbers_J + 1).lgamma()).exp()
        tails_J = torch.igammac(half_degrees + numbers_J, torch.full_like(numbers_J, g / 2))
        return float((weights_J * tails_J).sum())

    least = _first(lambda g: survival(g, 0.0) <= false_alarm)
    return _first(lambda noncentrality: survival(least, noncentrality) >= power) / effect


def _first(holds: Callable[[float], bool]) -> float:
    """The smallest positive number for which a condition holds, which then holds for all above."""
    low, high = 0.0, 1.0
    while not holds(high):
        low, high = high, 2 * high
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
