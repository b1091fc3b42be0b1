"""First-order stochastic dominance of one sample of per-example figures over another.

Paper: Zhou et al. 2023, figures 3b and C.16, which show it by a plot. Here with intervals over
resamples of the examples, which both samples share.
"""

# N units, R resamples, X points
from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from paceline.core.bootstrap import draw_resamples, percentile_interval
from paceline.errors import UsageError
from paceline.rng import named_generator
from paceline.studies.evidence import column, select
from paceline.studies.rows import pooled

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from paceline.core.bootstrap import Interval
    from paceline.studies.claim_file import Dominance, Side
    from paceline.studies.rows import StudyRow

_NUM_RESAMPLES = 4000
_NUM_POINTS = 200


class DominanceEffect(NamedTuple):
    """Distances of two distribution functions.

    Attributes:
        against: sup_x [F_first(x) - F_second(x)]; 0 if first dominates.
        above: sup_x [F_second(x) - F_first(x)].
        gain: Mean of first - second, which is positive if first dominates and differs.
    """

    against: Interval
    above: Interval
    gain: Interval
    num_units: int


def dominance_effect(
    test: Dominance, rows: Sequence[StudyRow], tail: float
) -> DominanceEffect | None:
    """Both distances with intervals; None if a side has no rows.

    Raises:
        UsageError: a side matches several settings, or the sides have different examples.
    """
    sides = [own_figures(test, side, rows) for side in (test.first, test.second)]
    first, second = sides
    if first is None or second is None:
        return None
    if first.keys() != second.keys():
        raise UsageError("the sides of a claim measure different examples; run the study again")
    values = [torch.tensor([side[unit] for unit in first]) for side in (first, second)]
    return distances(values[0], values[1], tail)


def distances(first_N: Tensor, second_N: Tensor, tail: float) -> DominanceEffect:
    """Largest differences of the two empirical distribution functions, with intervals. [N] each."""
    count = len(first_N)
    picks_RN = draw_resamples(count, _NUM_RESAMPLES, named_generator(0, "dominance", count))
    picks_RN = torch.cat([torch.arange(count)[None], picks_RN])
    points_X = torch.cat([first_N, second_N]).unique()
    if len(points_X) > _NUM_POINTS:
        points_X = points_X[torch.linspace(0, len(points_X) - 1, _NUM_POINTS).long()]
    cdfs = [
        torch.stack([(side_N[picks_RN] <= point).double().mean(-1) for point in points_X], -1)
        for side_N in (first_N, second_N)
    ]
    gaps_RX = cdfs[0] - cdfs[1]
    zero = torch.zeros(())
    against_R = gaps_RX.amax(-1).maximum(zero)
    above_R = (-gaps_RX).amax(-1).maximum(zero)
    gain_R = (first_N - second_N)[picks_RN].double().mean(-1)
    return DominanceEffect(
        percentile_interval(against_R, tail),
        percentile_interval(above_R, tail),
        percentile_interval(gain_R, tail),
        count,
    )


def own_figures(test: Dominance, side: Side, rows: Sequence[StudyRow]) -> dict[int, float] | None:
    chosen = select(rows, test.rows, side.where)
    if not chosen:
        return None
    if any(row.setting != chosen[0].setting for row in chosen):
        raise UsageError("a side of a dominance test matches several settings; name one in where")
    row = pooled(chosen)
    over_N = column(row, side.over or test.over)
    under = side.under or test.under
    values_N = over_N if under is None else over_N / column(row, under).clamp(min=1e-9)
    return dict(zip(row.units, values_N.tolist(), strict=True))
