"""Comparison of two rows by one figure, such as two drafts on the same texts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core.bootstrap import Interval, difference_interval
from paceline.errors import UsageError
from paceline.results.figures import FIGURES

if TYPE_CHECKING:
    from paceline.results.figures import Figure
    from paceline.results.row import Row

_STEP = 1e-4  # relative, of slopes of formulas


def paired_difference(figure: Figure, first: Row, second: Row) -> Interval:
    """A figure of `first` - that of `second`, on the units that both measured.

    What makes a unit hard for both cancels. The interval is over units; that of one unit is
    unbounded. Totals of the rows, such as the costs of passes, count as exact.

    Raises:
        UsageError: The rows share no units, or lack what the figure is made from.
    """
    first, second = figure.measured(first), figure.measured(second)
    shared = [unit for unit in first.units if unit in set(second.units)]
    if first.population != second.population or not shared:
        raise UsageError(
            f"{figure.words} is compared on {first.population} and on {second.population}, which "
            "share no units; measure both on the same"
        )
    sides = [row.only(shared) for row in (first, second)]
    base = FIGURES[figure.of] if figure.of else figure
    if not base.ratios:
        raise UsageError(f"{figure.words} is a total and no ratio; compare a ratio of sums")
    columns = [base.columns(row) for row in sides]
    for row, ratios in zip(sides, columns, strict=True):
        if any(float(under_N.sum()) == 0 for _, under_N in ratios):
            raise UsageError(f"{figure.words} of {row.setting} has a denominator of 0 in all units")
    one, two = (_slope(figure, row) for row in sides)
    found = difference_interval(*columns, scales=(one, two))
    value = figure.value(sides[0]) - figure.value(sides[1])
    return Interval(value, value + found.low - found.value, value + found.high - found.value)


def _slope(figure: Figure, row: Row) -> float:
    """Of the figure's formula at the row's value; 1 for a figure that is a product of ratios."""
    if figure.formula is None:
        return 1.0
    value = FIGURES[figure.of].value(row)
    step = _STEP * (abs(value) or 1.0)
    high, low = (figure.of_base(row, end) for end in (value + step, value - step))
    return (high - low) / (2 * step)
