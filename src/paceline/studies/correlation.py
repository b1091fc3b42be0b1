"""Correlation over drafts between two figures of each, such as its quality and its tau.

Paper: Zhou et al. 2023, figure 5a, which shows it by a plot. Differs: a correlation with interval.

Figures are measured on examples, and their errors would make a correlation too small (Spearman
1904) or, as all drafts share the examples, too large. So the expected sums of squares and products
of the errors are subtracted first. The interval is over the examples; the drafts are all there are.

Error rates in simulations are in tests/statistical/test_sequential_claims.py.
"""

# N units, D drafts
from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from paceline.core.bootstrap import LEAST_UNITS, Interval
from paceline.core.bounded_means import mean_bounds
from paceline.errors import UsageError
from paceline.rng import named_generator
from paceline.studies.evidence import ratio_estimate, select
from paceline.studies.rows import pooled

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from paceline.studies.claim_file import Correlation, SumRatio
    from paceline.studies.rows import StudyRow

_LEAST_DRAFTS = 4


class CorrelationEffect(NamedTuple):
    """A correlation with its interval, and the numbers of drafts and of examples."""

    interval: Interval
    num_drafts: int
    num_units: int


def correlation_effect(
    test: Correlation, rows: Sequence[StudyRow], tail: float
) -> CorrelationEffect | None:
    """The correlation of a test; None if there are too few rows or examples.

    `tail`: probability on either side of the interval.

    Raises:
        UsageError: the rows do not have a sum, or have different examples.
    """
    looks: dict[str, list[StudyRow]] = {}
    for row in select(rows, test.rows):
        looks.setdefault(str(sorted(row.setting.items())), []).append(row)
    drafts = [pooled(group) for group in looks.values()]
    if len(drafts) < _LEAST_DRAFTS or len(drafts[0].units) < LEAST_UNITS:
        return None
    if any(
        (one.population, one.units) != (drafts[0].population, drafts[0].units) for one in drafts
    ):
        raise UsageError("the drafts of a claim have different examples; run the study again")
    first, second = (_figures(one, drafts) for one in (test.first, test.second))
    found = correlation(*first, *second, tail)
    return CorrelationEffect(found, len(drafts), len(drafts[0].units))


def _figures(side: SumRatio, drafts: Sequence[StudyRow]) -> tuple[Tensor, Tensor]:
    """-> the figure of each draft, [D], and the influence of each unit on them, [N, D]."""
    found = [ratio_estimate(row, side.over, side.under) for row in drafts]
    values_D = torch.tensor([one.value for one in found], dtype=torch.float64)
    return values_D, torch.stack([one.influence_N for one in found], dim=1)


def correlation(
    x_D: Tensor, x_influence_ND: Tensor, y_D: Tensor, y_influence_ND: Tensor, tail: float
) -> Interval:
    """The correlation of x and y without their errors, and its interval by the delta method.

    All of [-1, 1] if the values differ by no more than their errors.
    """
    count = len(x_influence_ND)
    x_D, y_D = x_D - x_D.mean(), y_D - y_D.mean()
    ex_ND = x_influence_ND - x_influence_ND.mean(1, keepdim=True)
    ey_ND = y_influence_ND - y_influence_ND.mean(1, keepdim=True)

    def product(a_D: Tensor, b_D: Tensor, ea_ND: Tensor, eb_ND: Tensor) -> float:
        errors = float((ea_ND * eb_ND).sum()) / (count - 1) / count
        return float(a_D @ b_D) - errors

    xx = product(x_D, x_D, ex_ND, ex_ND)
    yy = product(y_D, y_D, ey_ND, ey_ND)
    if min(xx, yy) <= 0:
        return Interval(0.0, -1.0, 1.0)
    value = product(x_D, y_D, ex_ND, ey_ND) / math.sqrt(xx * yy)
    influence_N = (ex_ND @ y_D + ey_ND @ x_D) / math.sqrt(xx * yy)
    influence_N -= value * (ex_ND @ x_D / xx + ey_ND @ y_D / yy)
    low, high = mean_bounds([influence_N], tail, named_generator(0, "correlation", count), [None])
    bounds = (value, value + low, value + high)
    return Interval(*(max(-1.0, min(1.0, one)) for one in bounds))
