"""Charts of a page as Vega-Lite specifications, built with Vega-Altair.

Why Vega-Altair and not Plotly, both tried with the versions in constraints.txt: its bundle adds
0.9 MB to a page, Plotly's 4.8 MB; it draws SVG whose marks have text alternatives, which screen
readers use; and it passes CSS variables on as colours, so themes and printing need no JavaScript.

Each function takes rows (`page.Line`) and columns: an `Axis`, or the name of a figure or setting,
whose axis `axis_of` knows. `plotted` makes the block of a page from them. A value without finite
bounds is drawn without an interval. `names`: all
groups of a page, so that a group has the same colour and shape in all of its charts.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any

import altair as alt
import vl_convert

from paceline.records import atomic_write_bytes
from paceline.results.figures import FIGURES
from paceline.view.definitions import words_of
from paceline.view.page import Figure, Panel, flat, grouped

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

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
        "titleFontWeight": 500,
        "titlePadding": 8,
        "labelLimit": 150,
        "labelOverlap": "greedy",
        "labelSeparation": 6,
    },
    "legend": {
        "orient": "bottom",
        "labelColor": INK,
        "labelFontSize": 12.5,
        "symbolSize": 80,
        "title": None,
    },
    "text": {"color": INK, "fontSize": 12},
    "autosize": {"type": "fit-x", "contains": "padding"},
}
"""Of all charts; a page has it once."""

_HEIGHT = 320
_ROW_HEIGHT = 30
_DASHED = {"aria": False, "color": MUTED, "strokeDash": [4, 4], "strokeWidth": 1.2}
_LONGEST = 20  # letters of a name on one line
_REFERENCES: dict[str, float] = dict.fromkeys(("speedup", "relative_quality", "gain"), 1.0)
"""Values of the target alone, or of the initial draft, which charts mark."""


@dataclass
class Axis:
    """A quantitative column as an axis.

    Attributes:
        field: The column, without dots and brackets.
        title: With the unit; by default that of the registry or the column's words.
        format: Of numbers, as in d3; by default that of the registry or three digits.
        zero: Whether the axis includes 0.
        whole: Whether all values are whole numbers.
        at: Value of a dashed line; by default that of `_REFERENCES`, if any.
    """

    field: str
    title: str = ""
    format: str = ""
    zero: bool = False
    whole: bool = False
    at: float | None = None

    def __post_init__(self) -> None:
        figure = FIGURES.get(self.field)
        if figure is not None:
            self.title, self.format = self.title or figure.axis, self.format or figure.format
        self.title, self.format = self.title or words_of(self.field), self.format or ".3~f"
        if self.at is None:
            self.at = _REFERENCES.get(self.field)

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
        scale = alt.Scale(zero=self.zero, nice=True)
        return {"title": self.title, "scale": scale, "axis": axis}


Column = str | Axis
"""An axis, or a name of a figure or setting."""

_AXES = {
    "step": Axis("step", "optimizer step", "d", whole=True),
    "seconds": Axis("seconds", "seconds of training", ".0f"),
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
    *columns: Column | Mapping[str, Column],
    group: str = "",
    by: str = "",
    **settings: Any,
) -> Figure:
    """A figure whose chart is `chart(rows, *columns, **settings)`.

    Args:
        title: What is plotted against what.
        text: What the figure shows and how to read it.
        rows: The data.
        chart: A function of this module.
        columns: What it plots. Columns by title: a chart for each that has values.
        group: The column of colours and shapes, which the charts of the figure share.
        by: A column; the figure has a chart for each of its values, in their order.
        settings: Further arguments of the function.
    """
    if group:
        settings = {"group": group, "names": _names(rows, group)} | settings
    named = [one for one in columns if isinstance(one, Mapping)]
    titles = [
        name
        for name in (named[0] if named else [""])
        if _with_all(rows, *(one[name] for one in named))
    ]
    parts = grouped(rows, lambda row: row[by]) if by else {"": rows}
    panels: list[Panel] = []
    for name in titles:
        chosen = [one[name] if isinstance(one, Mapping) else one for one in columns]
        for value in sorted(parts):
            heading = f"{by} {value}" if by else name
            panels.append(Panel(chart(parts[value], *chosen, **settings), heading))
    return Figure(title, text, panels, rows)


def _with_all(rows: Sequence[Line], *columns: Column) -> list[Line]:
    """The rows whose values of all columns are finite."""
    fields = [axis_of(column).field for column in columns]
    return [row for row in flat(rows) if all(is_finite(row.get(field)) for field in fields)]


def frontier(
    rows: Sequence[Line], x: Column, y: Column, group: str, *, detail: str = "", **settings: Any
) -> Spec:
    """A line for each group through its rows in their order, with intervals along both axes.

    Rows without both figures are left out; likewise in `points`. `detail`: a column that divides
    the line of a group; `settings`: see `_plot`; likewise below.
    """
    known = [{**row, "place": place} for place, row in enumerate(_with_all(rows, x, y))]
    line = {"order": "place:Q"} | ({"detail": f"{detail}:N"} if detail else {})
    return _plot(known, x, y, group, line=line, **settings)


def points(rows: Sequence[Line], x: Column, y: Column, group: str, **settings: Any) -> Spec:
    """Two figures of each row, with intervals along both axes."""
    return _plot(_with_all(rows, x, y), x, y, group, **settings)


def curves(
    rows: Sequence[Line], x: Column, y: Column, group: str, *, size: int = 70, **settings: Any
) -> Spec:
    """A line for each group along x, with bands for the intervals of y."""
    return _plot(rows, x, y, group, line={}, band=True, size=size, **settings)


def _plot(
    rows: Sequence[Line],
    x: Column,
    y: Column,
    group: str,
    *,
    labels: Sequence[str] = (),
    names: Sequence[str] = (),
    diagonal: bool = False,
    band: bool = False,
    line: Mapping[str, str] | None = None,
    size: int = 95,
) -> Spec:
    """A point for each row; a click on the legend selects a group.

    Args:
        rows: The data.
        x: The horizontal axis.
        y: The vertical axis.
        group: Column of the groups, which differ in colour and shape.
        labels: Further columns shown on hover.
        names: All groups of the page.
        diagonal: With the line where both figures are equal.
        band: With shaded intervals of y.
        line: Channels of a line through the points; None: no line.
        size: Of the points.
    """
    rows, x, y = flat(rows), axis_of(x), axis_of(y)
    chosen = alt.selection_point(fields=[group], bind="legend")

    def seen(opacity: float) -> Any:
        """The opacity of the selected groups, and a fraction of it for the others.

        Lines, bands and points need different channels for it: with one channel in all layers,
        Vega-Lite makes the legend ignore clicks.
        """
        return alt.when(chosen).then(alt.value(opacity)).otherwise(alt.value(0.12 * opacity))

    colour, form = _styles(rows, group, names)
    base = alt.Chart().encode(color=colour)
    layers = _references(x, y)
    if diagonal and rows:
        ends = [row[axis.field] for row in rows for axis in (x, y)]
        both = _of_values({"at": min(ends)}, {"at": max(ends)})
        layers.append(both.mark_line(**_DASHED).encode(x=x.x("at"), y=y.y("at")))
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
    if line is not None:
        drawn = base.mark_line(aria=False, strokeWidth=1.6)
        layers.append(drawn.encode(x=x.x(), y=y.y(), strokeOpacity=seen(1)).encode(**line))
    tooltip = [*_named([group, *labels]), *x.tooltips(rows), *y.tooltips(rows)]
    spots = base.mark_point(filled=True, opacity=1, size=size).encode(shape=form, x=x.x(), y=y.y())
    layers.append(spots.encode(tooltip=tooltip, opacity=seen(1)).add_params(chosen))
    return _finished(alt.layer(*layers, height=_HEIGHT), rows)


def intervals(rows: Sequence[Line], name: str, x: Column) -> Spec:
    """A value with its interval on each line."""
    rows, x = flat(rows), axis_of(x)
    lines = _names(rows, name)
    across = alt.Y(
        name, type="nominal", sort=lines, title=None, scale=alt.Scale(domain=lines)
    ).axis(
        domain=False,
        ticks=False,
        grid=True,
        labelOverlap=False,
        labelLineHeight=12,
        labelFontSize=11,
        labelExpr=f"({json.dumps({line: _in_two(str(line)) for line in lines})})[datum.label]",
    )
    base = alt.Chart().encode(y=across, color=alt.value(COLOURS[0]))
    layers = _references(x, None)
    if x.has_intervals(rows):
        bars = base.transform_filter(x.are_known()).mark_rule(aria=False, strokeWidth=2)
        layers.append(bars.encode(x=x.x(x.low), x2=alt.X2(x.high)))
    tooltip = [*_named([name]), *x.tooltips(rows)]
    marks = base.mark_point(filled=True, opacity=1, size=90)
    layers.append(marks.encode(x=x.x(), tooltip=tooltip))
    height = _ROW_HEIGHT * max(1, len(lines))
    return _finished(alt.layer(*layers, height=max(height, 80)), rows)


def columns(
    rows: Sequence[Line], x: Column, y: Column, *, band: tuple[float, float] | None = None
) -> Spec:
    """A bar for each row; shaded between the values of `band`."""
    x, y = axis_of(x), axis_of(y)
    layers: list[alt.Chart] = []
    if band is not None:
        area = _of_values({"from": band[0], "to": band[1]}).mark_rect(
            aria=False, color=COLOURS[1], opacity=0.16
        )
        layers.append(area.encode(y=y.y("from"), y2=alt.Y2("to")))
    across = alt.X(x.field, type="ordinal", title=x.title, sort=None).axis(
        labelAngle=0, labelOverlap=True
    )
    bars = alt.Chart().mark_bar(color=COLOURS[0], opacity=0.85, cornerRadiusEnd=2)
    tooltip = [*x.tooltips(rows), *y.tooltips(rows)]
    layers.append(bars.encode(x=across, y=y.y(), tooltip=tooltip))
    layers += _references(None, y)
    return _finished(alt.layer(*layers, height=_HEIGHT - 60), rows)


def save(panels: Sequence[Panel], path: Path, columns: int) -> None:
    """Write charts side by side as a PNG image; raises StorageError if it cannot be written."""
    charts = [{**panel.chart, "title": panel.title, "width": 520} for panel in panels]
    config = {name: part for name, part in CONFIG.items() if name != "autosize"}
    spec = {"concat": charts, "columns": columns, "config": config | {"background": "white"}}
    image = vl_convert.vegalite_to_png(in_light_colours(json.dumps(spec)), scale=1.5)
    atomic_write_bytes(path, image)


def in_light_colours(text: str) -> str:
    """A specification for an image, which knows no variables."""
    style = (resources.files("paceline.view") / "templates/style.css").read_text("utf-8")
    light = dict(re.findall(r"--([\w-]+): light-dark\((#\w+)", style))
    return re.sub(r"var\(--([\w-]+)\)", lambda name: light[name[1]], text)


def colours_of(names: list[str]) -> list[str]:
    """A colour for each name, repeated if there are many: shapes tell those apart."""
    return [COLOURS[number % len(COLOURS)] for number in range(len(names))]


def shapes_of(names: list[str]) -> list[str]:
    """A shape for each name; no two of 24 names share both colour and shape."""
    count = len(COLOURS)
    return [SHAPES[(at % count + 2 * (at // count)) % len(SHAPES)] for at in range(len(names))]


def is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _styles(rows: Sequence[Line], group: str, names: Sequence[str]) -> tuple[alt.Color, alt.Shape]:
    """The colours and shapes of groups, of which the legend has those that occur."""
    known, legend = list(names) or _names(rows, group), _legend(rows, group)
    colours, shapes = (
        {"type": "nominal", "legend": legend, "scale": alt.Scale(domain=known, range=styles)}
        for styles in (colours_of(known), shapes_of(known))
    )
    return alt.Color(group, **colours), alt.Shape(group, **shapes)


def _legend(rows: Sequence[Line], group: str) -> alt.Legend | None:
    """The names that occur, in as many columns as fit; no legend for a single one."""
    names = _names(rows, group)
    if len(names) < 2:
        return None
    widest = 44 + 7.4 * max(8, *(len(str(name)) for name in names))
    fitting = alt.ExprRef(f"max(1, floor(width / {widest:.0f}))")
    return alt.Legend(values=names, columns=fitting, labelLimit=alt.ExprRef("width - 30"))


def _references(x: Axis | None, y: Axis | None) -> list[alt.Chart]:
    """Dashed lines at the references of the axes."""
    layers: list[alt.Chart] = []
    if x is not None and x.at is not None:
        layers.append(_of_values({"at": x.at}).mark_rule(**_DASHED).encode(x=x.x("at")))
    if y is not None and y.at is not None:
        layers.append(_of_values({"at": y.at}).mark_rule(**_DASHED).encode(y=y.y("at")))
    return layers


def _of_values(*values: Line) -> alt.Chart:
    return alt.Chart(alt.Data(values=list(values)))


def _named(names: Sequence[str]) -> list[alt.Tooltip]:
    return [alt.Tooltip(name, type="nominal", title=words_of(name)) for name in names]


def _names(rows: Sequence[Line], column: str) -> list[Any]:
    return list(dict.fromkeys(row[column] for row in rows))


def _in_two(name: str) -> list[str]:
    """A long name as two lines, divided after a word near its middle."""
    ends = [at + 1 for at, letter in enumerate(name) if letter in " /_" and at]
    if len(name) <= _LONGEST or not ends:
        return [name]
    end = min(ends, key=lambda end: abs(end - len(name) / 2))
    return [name[:end].rstrip(), name[end:]]


def _finished(chart: alt.LayerChart | alt.FacetChart, rows: Sequence[Line]) -> Spec:
    """The specification with the container's width and the columns of the data that it draws."""
    spec = chart.properties(width="container", data=_of_values().data).to_dict()
    spec.pop("$schema", None)  # an address, which a page without network does not need
    spec.pop("config", None)  # the page's is used
    text = json.dumps(spec)
    drawn = {name for row in rows for name in row if f'"field": {json.dumps(name)}' in text}
    data = [{name: _plain(row[name]) for name in row if name in drawn} for row in rows]
    return spec | {"data": {"values": data}}


def _plain(value: Any) -> Any:
    """Four significant digits; JSON has no infinite numbers and no NaN."""
    if not isinstance(value, float):
        return value
    return float(f"{value:.4g}") if math.isfinite(value) else None
