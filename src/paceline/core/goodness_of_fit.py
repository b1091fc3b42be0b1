"""G-test that sampled tokens follow a stated distribution, pooled over all contexts.

In each context, tokens are sorted by q/p, most over-proposed by the draft first, and pooled into
cells of equal target mass; tokens on a cell border are split at random in proportion. If the text
follows the target p, all cells are equally likely; if it follows the draft q, the first cells are
over-represented. Rare tokens do not cause cells with small expected counts.
"""

# T positions, V vocabulary, K cells
from __future__ import annotations

import torch
from scipy import special  # pyright: ignore[reportMissingTypeStubs]
from torch import Tensor

from paceline.errors import UsageError


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


def least_tokens(num_cells: int) -> int:
    """Tokens that the test needs: 5 expected per cell, for the chi-square approximation."""
    return 5 * num_cells


def g_test(counts_K: Tensor) -> tuple[float, float]:
    """G = 2 sum O ln(O/E) against equal cells, and its chi-square p-value, K - 1 degrees.

    Raises:
        UsageError: fewer than `least_tokens`.
    """
    total, num_cells = int(counts_K.sum()), len(counts_K)
    if total < least_tokens(num_cells):
        raise UsageError(
            f"got {total} tokens for {num_cells} cells, wanted at least "
            f"{least_tokens(num_cells)}; use more prompts or more new tokens"
        )
    expected = total / num_cells
    observed_K = counts_K.double()
    g = 2 * float(torch.xlogy(observed_K, observed_K / expected).sum())
    return g, float(special.chdtrc(num_cells - 1, max(g, 0.0)))
