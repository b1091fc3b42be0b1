"""Comparison of the qualities of two families of cells over the costs that both reach.

A family is a curve of quality against cost, linear between its cells. The effect is the mean
difference of two curves, as a reader sees which curve of a plot is above. It changes little when a
quality does, so that it needs fewer examples than the least cost at a floor of quality, which jumps
from one cell to another.
"""

# C cells, P points, R resamples
from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from paceline.bench.comparison import Comparison, Side
from paceline.core.bootstrap import percentile_interval

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.bench.comparison import Cost, Group
    from paceline.bench.measured_frontier import Frontier

_NUM_POINTS = 32
_TINY = 1e-12


def compare_curves(
    frontier: Frontier,
    first: Group,
    second: Group,
    cost: Cost,
    num_comparisons: int,
    tail: float,
    other: Frontier | None = None,
) -> Comparison | None:
    """Mean quality / target's of first - that of second, over the gains that both reach.

    Args:
        frontier: The cells.
        first: One family.
        second: The other.
        cost: The gain in cost.
        num_comparisons: Correct `strict` for this number.
        tail: Probability on either side of the intervals of differences.
        other: The cells of the second family, on the same examples; None: those of `frontier`.

    Returns:
        None if one of them has no cell, or no gain is reached by both.
    """
    frontiers = frontier, frontier if other is None else other
    groups = (first.cells(frontiers[0]), second.cells(frontiers[1]))
    if not all(groups):
        return None

    gains = [cost.gain(one, cells) for one, cells in zip(frontiers, groups, strict=True)]
    qualities = [
        torch.stack([one.resampled("relative quality", row) for row in cells])
        for one, cells in zip(frontiers, groups, strict=True)
    ]
    low_R = torch.stack([gain_CR.amin(0) for gain_CR in gains]).amax(0)
    high_R = torch.stack([gain_CR.amax(0) for gain_CR in gains]).amin(0)
    if low_R[0] > high_R[0]:
        return None
    shares_P1 = (torch.arange(_NUM_POINTS, dtype=low_R.dtype)[:, None] + 0.5) / _NUM_POINTS
    points_PR = low_R + shares_P1 * (high_R - low_R)
    means = [
        along(gain_CR, quality_CR, points_PR).mean(0)
        for gain_CR, quality_CR in zip(gains, qualities, strict=True)
    ]
    sides = [
        Side(group.name, len(cells), percentile_interval(mean_R), ())
        for group, cells, mean_R in zip((first, second), groups, means, strict=True)
    ]
    difference_R = means[0] - means[1]
    whole = max(float(gain_CR[:, 0].amax() - gain_CR[:, 0].amin()) for gain_CR in gains)
    overlap = float(high_R[0] - low_R[0]) / whole if whole else 1.0
    return Comparison(
        sides[0],
        sides[1],
        min(map(len, groups)),
        percentile_interval(difference_R, tail),
        percentile_interval(difference_R, tail / num_comparisons),
        difference_R,
        overlap,
    )


def along(gain_CR: Tensor, quality_CR: Tensor, points_PR: Tensor) -> Tensor:
    """Qualities at these gains: linear between the cells, constant beyond them. -> [P, R]."""
    gain_CR, order_CR = gain_CR.sort(0)
    quality_CR = quality_CR.gather(0, order_CR)
    found_PR = quality_CR[0].expand_as(points_PR)
    for left in range(len(gain_CR) - 1):
        step_R = (gain_CR[left + 1] - gain_CR[left]).clamp(min=_TINY)
        share_PR = ((points_PR - gain_CR[left]) / step_R).clamp(0, 1)
        found_PR = found_PR + share_PR * (quality_CR[left + 1] - quality_CR[left])
    return found_PR
