"""Charts of a page as Vega-Lite specifications, built with Vega-Altair.

Why Vega-Altair and not Plotly, both tried with the versions in constraints.txt: its bundle adds
0.9 MB to a page, Plotly's 4.8 MB; it draws SVG whose marks have text alternatives, which screen
readers use; and it passes CSS variables on as colours, so themes and printing need no JavaScript.

Each function takes rows (`page.Line`) and columns: an `Axis`, or the name of a figure or setting,
whose axis `axis_of` knows. `plotted` makes the block of a page from them. A value without finite
bounds is drawn without an interval.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import altair as alt

from paceline.results.figures import FIGURES
from paceline.results.row import grouped
from paceline.view.page import Figure, flat, words_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from paceline.view.page import Line

    Spec = dict[str, Any]

# Every colour is a variable of the style sheet, which Vega's SVG renderer passes on: the style
# sheet alone switches between light, dark and print, and charts are not drawn again.
INK, MUTED, LINE = (f"var(--{name})" for name in ("ink", "muted", "line"))
COLOURS = [f"var(--c{number})" for number in range(1, 9)]
SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down")

CONFIG: dict[str, Any] = {
    "background": "transparent",
    "font": "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif",
    "view": {"stroke": None},
    "axis": {
        "labelColor": MUTED,
        "titleColor": INK,
        "domainColor": LINE,
        "tickColor": LINE,
        "gridColor": LINE,
        "gridOpacity": 0.55,
        "labelFontSize": 12,
        "titleFontSize": 12.5,
    },
    "legend": {"orient": "bottom", "labelColor": INK, "labelFontSize": 12.5, "title": None},
    "autosize": {"type": "fit-x", "contains": "padding"},
}
"""Of all charts; a page has it once."""

_HEIGHT = 320
_DASHED = {"aria": False, "color": MUTED, "strokeDash": [4, 4], "strokeWidth": 1.2}
_REFERENCES: dict[str, float] = dict.fromkeys(("speedup", "relative_quality", "gain"), 1.0)
"""Values of the target alone, or of the initial draft, which charts mark."""


@dataclass
class Axis:
    """A quantitative column as an axis; by default as the registry describes its figure.

    Attributes:
        field: The column, without dots and brackets.
        title: With the unit.
        format: Of numbers, as in d3.
        whole: Whether all values are whole numbers.
    """

    field: str
    title: str = ""
    format: str = ""
    whole: bool = False

    def __post_init__(self) -> None:
        figure = FIGURES.get(self.field)
        if figure is not None:
            self.title, self.format = self.title or figure.axis, self.format or figure.format
        self.title, self.format = self.title or words_of(self.field), self.format or ".3~f"

    @property
    def at(self) -> float | None:
        """Value of a dashed line."""
        return _REFERENCES.get(self.field)

    @property
    def low(self) -> str:
        return f"{self.field}_low"

    @property
    def high(self) -> str:
        return f"{self.field}_high"

    def x(self, field: str = "") -> alt.X:
        """This axis for another column, such as a bound."""
        return alt.X(field or self.field, type="quantitative", **self._settings())

    def y(self, field: str = "") -> alt.Y:
        """As `x`, upwards."""
        return alt.Y(field or self.field, type="quantitative", **self._settings())

    def are_known(self) -> str:
        """A Vega expression: true for rows with an interval."""
        return " && ".join(f"isValid(datum[{json.dumps(end)}])" for end in (self.low, self.high))

    def has_intervals(self, rows: Sequence[Line]) -> bool:
        """Whether any row has finite bounds; Vega warns of a layer without data."""
        ends = ((row.get(self.low), row.get(self.high)) for row in rows)
        return any(is_finite(low) and is_finite(high) for low, high in ends)

    def tooltips(self, rows: Sequence[Line]) -> list[alt.Tooltip]:
        """The value and its bounds, if any row has them."""
        names = {self.field: self.title}
        if self.has_intervals(rows):
            names |= {self.low: "95% interval from", self.high: "to"}
        return [
            alt.Tooltip(name, type="quantitative", title=title, format=self.format)
            for name, title in names.items()
        ]

    def _settings(self) -> dict[str, Any]:
        axis = alt.Axis(tickCount=5)  # the step of the ticks decides their precision
        if self.whole:
            axis = alt.Axis(format="d", tickMinStep=1)
        elif self.format.endswith(("%", "s")):
            axis = alt.Axis(format=self.format, tickCount=5)
        scale = alt.Scale(zero=False, nice=True)
        return {"title": self.title, "scale": scale, "axis": axis}


Column = str | Axis
"""An axis, or a name of a figure or setting."""

_AXES = {
    "step": Axis("step", "optimizer step", "d", whole=True),
    "gamma": Axis("gamma", "gamma: drafted tokens per block", "d", whole=True),
}
"""Of columns that are no figures."""


def axis_of(column: Column) -> Axis:
    """The axis of a column, by the name of its figure or setting."""
    return column if isinstance(column, Axis) else _AXES.get(column, Axis(column))


def plotted(
    title: str,
    text: str,
    rows: Sequence[Line],
    chart: Callable[..., Spec],
    *columns: Column,
    by: str = "",
    **settings: Any,
) -> Figure:
    """A figure whose chart is `chart(rows, *columns, **settings)`.

    `by`: a column; the figure has a chart for each of its values, in their order, in which a group
    has the same colour and shape.
    """
    parts = grouped(rows, lambda row: row[by]) if by else {"": rows}
    if group := settings.get("group"):
        settings = {"names": _names(rows, group)} | settings
    headings = {value: f"{by} {value}" if by else "" for value in sorted(parts)}
    panels = {
        heading: chart(parts[value], *columns, **settings) for value, heading in headings.items()
    }
    return Figure(title, text, panels, rows)


def known(rows: Sequence[Line], *columns: Column) -> list[Line]:
    """The rows whose values of all columns are finite."""
    fields = [axis_of(column).field for column in columns]
    return [row for row in flat(rows) if all(is_finite(row.get(field)) for field in fields)]


def frontier(
    rows: Sequence[Line], x: Column, y: Column, group: str, *, detail: str = "", **settings: Any
) -> Spec:
    """A line for each group through its rows in their order, with intervals along both axes.

    Rows without both figures are left out. `detail`: a column that divides the line of a group;
    `settings`: see `_plot`.
    """
    placed = [{**row, "place": place} for place, row in enumerate(known(rows, x, y))]
    line = {"order": "place:Q"} | ({"detail": f"{detail}:N"} if detail else {})
    return _plot(placed, x, y, group, line=line, **settings)


def curves(rows: Sequence[Line], x: Column, y: Column, group: str, **settings: Any) -> Spec:
    """A line for each group along x, with bands for the intervals of y."""
    return _plot(rows, x, y, group, band=True, **settings)


def _plot(
    rows: Sequence[Line],
    x: Column,
    y: Column,
    group: str,
    *,
    labels: Sequence[str] = (),
    names: Sequence[str] = (),
    band: bool = False,
    line: Mapping[str, str] | None = None,
) -> Spec:
    """A point for each row and a line through them; a click on the legend selects a group.

    Args:
        rows: The data.
        x: The horizontal axis.
        y: The vertical axis.
        group: Column of the groups, which differ in colour and shape.
        labels: Further columns shown on hover.
        names: All groups of the page.
        band: With shaded intervals of y.
        line: Channels of the line.
    """
    rows, x, y = flat(rows), axis_of(x), axis_of(y)
    chosen = alt.selection_point(fields=[group], bind="legend")

    def seen(opacity: float) -> Any:
        """The opacity of the selected groups, and a fraction of it for the others.

        Lines, bands and points need different channels for it: with one channel in all layers,
        Vega-Lite makes the legend ignore clicks.
        """
        return alt.when(chosen).then(alt.value(opacity)).otherwise(alt.value(0.12 * opacity))

    # Vega repeats colours and shapes: no two of 24 groups have both in common.
    groups, legend = list(names) or _names(rows, group), _legend(rows, group)
    colour, form = (
        {"type": "nominal", "legend": legend, "scale": alt.Scale(domain=groups, range=styles)}
        for styles in (COLOURS, SHAPES)
    )
    base = alt.Chart().encode(color=alt.Color(group, **colour))
    dashed = [(x, x.x("at")), (y, y.y("at"))]
    layers = [
        _of_values({"at": axis.at}).mark_rule(**_DASHED).encode(place)
        for axis, place in dashed
        if axis.at is not None
    ]
    if band and y.has_intervals(rows):
        area = base.transform_filter(y.are_known()).mark_area(aria=False, strokeOpacity=0)
        area = area.encode(x=x.x(), y=y.y(y.low), y2=alt.Y2(y.high))
        layers.append(area.encode(fillOpacity=seen(0.14)))
    for axis, ends in (
        (x, {"x": x.x(x.low), "x2": alt.X2(x.high), "y": y.y()}),
        (y, {"y": y.y(y.low), "y2": alt.Y2(y.high), "x": x.x()}),
    ):
        if axis.has_intervals(rows):
            bars = base.transform_filter(axis.are_known()).mark_rule(aria=False)
            layers.append(bars.encode(strokeOpacity=seen(0.45), **ends))
    drawn = base.mark_line(aria=False, strokeWidth=1.6).encode(x=x.x(), y=y.y())
    layers.append(drawn.encode(strokeOpacity=seen(1), **line or {}))
    named = [alt.Tooltip(name, type="nominal", title=words_of(name)) for name in [group, *labels]]
    tooltip = [*named, *x.tooltips(rows), *y.tooltips(rows)]
    spots = base.mark_point(filled=True, opacity=1, size=70).encode(x=x.x(), y=y.y())
    spots = spots.encode(shape=alt.Shape(group, **form), tooltip=tooltip, opacity=seen(1))
    layers.append(spots.add_params(chosen))
    return _finished(alt.layer(*layers, height=_HEIGHT), rows)


def is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _legend(rows: Sequence[Line], group: str) -> alt.Legend | None:
    """The names that occur, in as many columns as fit; no legend for a single one."""
    names = _names(rows, group)
    if len(names) < 2:
        return None
    widest = 44 + 7.4 * max(8, *(len(str(name)) for name in names))
    fitting = alt.ExprRef(f"max(1, floor(width / {widest:.0f}))")
    return alt.Legend(values=names, columns=fitting, labelLimit=alt.ExprRef("width - 30"))


def _of_values(*values: Line) -> alt.Chart:
    return alt.Chart(alt.Data(values=list(values)))


def _names(rows: Sequence[Line], column: str) -> list[Any]:
    return list(dict.fromkeys(row[column] for row in rows))


def _finished(chart: alt.LayerChart | alt.FacetChart, rows: Sequence[Line]) -> Spec:
    """The specification with the container's width, and the data."""
    spec = chart.properties(width="container", data=_of_values().data).to_dict()
    spec.pop("$schema", None)  # an address, which a page without network does not need
    spec.pop("config", None)  # the page's is used
    data = [{name: _plain(value) for name, value in row.items()} for row in rows]
    return spec | {"data": {"values": data}}


def _plain(value: Any) -> Any:
    """Four significant digits; JSON has no infinite numbers and no NaN."""
    if not isinstance(value, float):
        return value
    return float(f"{value:.4g}") if math.isfinite(value) else None
