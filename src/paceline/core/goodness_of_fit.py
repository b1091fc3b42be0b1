"""Does a sampled text follow a stated distribution? A G-test over all its contexts at once.

In each context the tokens are put in order of q/p, from what the draft proposes too often to what
it proposes too seldom, and pooled into cells of equal target mass, a token on a border falling to
either side in proportion. If the text follows the target p, every cell is equally likely in every
context; where the draft's q shows through, the first cells fill. No cell has a small expectation,
however rare its tokens.
"""

# T positions, V vocabulary, K cells
from __future__ import annotations

import torch
from torch import Tensor

from paceline.errors import UsageError


def equal_mass_cells(
    p_TV: Tensor, q_TV: Tensor, tokens_T: Tensor, num_cells: int, *, rng: torch.Generator
) -> tuple[Tensor, Tensor]:
    """The cell of each token, and whether the target gives it any chance. -> [T], bool [T].

    The tokens of a context stand in order of q/p, largest first, and each holds a stretch of [0, 1]
    as long as p(v); a token falls on a uniform point of its own stretch, so under p the point is
    uniform on [0, 1], whatever p and q are.
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
    """G = 2 sum O ln(O/E) against equal cells, and its p-value from chi-square, K - 1 degrees.

    Raises:
        UsageError: fewer than 5 expected a cell, too few for the chi-square approximation.
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
