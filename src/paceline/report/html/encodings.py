"""Axes, colours, shapes and text alternatives: the encodings that charts share."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import altair as alt

from paceline.report.html import theme

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.report.html.page import Row


@dataclass(frozen=True)
class Axis:
    """A quantitative column as an axis.

    Attributes:
        field: The column.
        title: With the unit.
        format: Of numbers, as in d3.
        bounds: Whether the rows have `field_low` and `field_high`.
        zero: Whether the axis includes 0.
        log: Whether the axis is logarithmic.
        whole: Whether all values are whole numbers.
        domain: Ends of the axis, such as those that several charts share; None: by the data.
    """

    field: str
    title: str
    format: str = ".3~f"
    bounds: bool = False
    zero: bool = False
    log: bool = False
    whole: bool = False
    domain: tuple[float, float] | None = None

    @property
    def low(self) -> str:
        return f"{self.field}_low"

    @property
    def high(self) -> str:
        return f"{self.field}_high"

    def scale(self) -> alt.Scale:
        if self.domain is not None:
            return alt.Scale(domain=list(self.domain), zero=False, nice=True)
        return alt.Scale(type="log") if self.log else alt.Scale(zero=self.zero, nice=True)

    def x(self, field: str | None = None) -> alt.X:
        """This axis for another column, such as a bound."""
        return alt.X(field or self.field, type="quantitative", **self._settings())

    def y(self, field: str | None = None) -> alt.Y:
        """As `x`."""
        return alt.Y(field or self.field, type="quantitative", **self._settings())

    def shared_by(self, rows: Sequence[Row], *values: float) -> Axis:
        """This axis with the ends that the values and bounds of all rows need."""
        found = [row.get(name) for row in rows for name in (self.field, self.low, self.high)]
        known = [one for one in (*found, *values) if one is not None and is_finite(one)]
        return replace(self, domain=(min(known), max(known))) if known else self

    def has_bounds(self) -> str:
        """A Vega expression: true for rows with an interval."""
        return f"isValid(datum['{self.low}']) && isValid(datum['{self.high}'])"

    def tooltips(self) -> list[alt.Tooltip]:
        names = {self.field: self.title}
        if self.bounds:
            names |= {self.low: "95% interval from", self.high: "to"}
        return [
            alt.Tooltip(name, type="quantitative", title=title, format=self.format)
            for name, title in names.items()
        ]

    def spoken(self) -> str:
        """A Vega expression: the value with its interval in words."""
        title = self.title.replace("'", "\\'")
        text = f"'{title} ' + format(datum['{self.field}'], '{self.format}')"
        if not self.bounds:
            return text
        ends = [f"format(datum['{name}'], '{self.format}')" for name in (self.low, self.high)]
        words = f"' (' + {ends[0]} + ' to ' + {ends[1]} + ')'"
        return f"{text} + ({self.has_bounds()} ? {words} : '')"

    def _settings(self) -> dict[str, Any]:
        axis = alt.Axis(tickCount=5)  # the step of the ticks decides their precision
        if self.whole:
            axis = alt.Axis(format="d", tickMinStep=1)
        elif self.format.endswith(("%", "s")):
            axis = alt.Axis(format=self.format, tickCount=5)
        return {"title": self.title, "scale": self.scale(), "axis": axis}


def colour_of(rows: Sequence[Row], group: str, names: Sequence[str]) -> alt.Color:
    names = list(names) or names_of(rows, group)
    scale = alt.Scale(domain=names, range=theme.colours_of(names))
    return alt.Color(group, type="nominal", scale=scale, legend=legend_of(rows, group))


def shape_of(rows: Sequence[Row], group: str, names: Sequence[str]) -> alt.Shape:
    names = list(names) or names_of(rows, group)
    scale = alt.Scale(domain=names, range=theme.shapes_of(names))
    return alt.Shape(group, type="nominal", scale=scale, legend=legend_of(rows, group))


def legend_of(rows: Sequence[Row], group: str) -> alt.Legend | None:
    """The names that occur; no legend for a single one."""
    names = names_of(rows, group)
    return alt.Legend(values=names) if len(names) > 1 else None


def seen(chosen: alt.Parameter, opacity: float) -> Any:
    """The opacity of groups that the legend selects, and a fraction of it for the others.

    Lines, bands and points need different channels for it: with one channel in all layers,
    Vega-Lite makes the legend ignore clicks.
    """
    return alt.when(chosen).then(alt.value(opacity)).otherwise(alt.value(0.12 * opacity))


def spoken(names: Sequence[str], *axes: Axis) -> Any:
    """The text alternative of a mark, which screen readers and the arrow keys read."""
    parts = [*(f"datum['{name}']" for name in names), *(axis.spoken() for axis in axes)]
    return alt.value(alt.expr(" + ', ' + ".join(f"({part})" for part in parts)))


def labels_of(names: Sequence[str]) -> list[alt.Tooltip]:
    return [alt.Tooltip(name, type="nominal", title=name.replace("_", " ")) for name in names]


def names_of(rows: Sequence[Row], column: str) -> list[str]:
    return list(dict.fromkeys(row[column] for row in rows))


def has_intervals(rows: Sequence[Row], axis: Axis) -> bool:
    """Whether any row has finite bounds; Vega warns of a layer without data."""
    if not axis.bounds:
        return False
    return any(is_finite(row.get(axis.low)) and is_finite(row.get(axis.high)) for row in rows)


def is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
