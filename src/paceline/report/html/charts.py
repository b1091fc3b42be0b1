"""Charts of a page as Vega-Lite specifications, built with Vega-Altair.

Why Vega-Altair and not Plotly, both tried with the versions in constraints.txt: its bundle adds
0.9 MB to a page, Plotly's 4.8 MB; it draws SVG whose marks have text alternatives, which the arrow
keys and screen readers use; and it passes CSS variables on as colours, so themes and printing need
no JavaScript. Both have hover; Plotly's zooming is missed least, because every figure has its data
as a table and a CSV file.

Each function takes rows (`page.Row`) and names of columns, without dots and brackets. Bounds of a
column `x` are in `x_low` and `x_high`; rows without finite bounds are drawn without an interval.
`names`: all groups of a page, so that a group has the same colour and shape in all of its charts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import altair as alt

from paceline.report.html import theme

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline.report.html.page import Row

    Spec = dict[str, Any]

_HEIGHT = 320
_ROW_HEIGHT = 28
_CELL_HEIGHT = 46
_MOST_STEPS = 200  # of an empirical distribution
_SCHEMA = "$schema"  # a URL, which a page without network does not need


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
    """

    field: str
    title: str
    format: str = ".3~f"
    bounds: bool = False
    zero: bool = False
    log: bool = False
    whole: bool = False

    @property
    def low(self) -> str:
        return f"{self.field}_low"

    @property
    def high(self) -> str:
        return f"{self.field}_high"

    def scale(self) -> alt.Scale:
        return alt.Scale(type="log") if self.log else alt.Scale(zero=self.zero, nice=True)

    def x(self, field: str | None = None) -> alt.X:
        """This axis for another column, such as a bound."""
        return alt.X(field or self.field, type="quantitative", **self._settings())

    def y(self, field: str | None = None) -> alt.Y:
        """As `x`."""
        return alt.Y(field or self.field, type="quantitative", **self._settings())

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

    def _settings(self) -> dict[str, Any]:
        axis = alt.Axis(tickCount=5)  # the step of the ticks decides their precision
        if self.whole:
            axis = alt.Axis(format="d", tickMinStep=1)
        elif self.format.endswith(("%", "s")):
            axis = alt.Axis(format=self.format, tickCount=5)
        return {"title": self.title, "scale": self.scale(), "axis": axis}


def frontier(
    rows: Sequence[Row],
    x: Axis,
    y: Axis,
    group: str,
    *,
    labels: Sequence[str] = (),
    detail: str | None = None,
    reference: tuple[float | None, float | None] = (None, None),
    names: Sequence[str] = (),
) -> Spec:
    """A line for each group through its rows in their order, with intervals along both axes.

    `labels`: further columns shown on hover. `detail`: a column that divides a group's line.
    `reference`: dashed lines at these values of x and y.
    """
    chosen = alt.selection_point(fields=[group], bind="legend")
    base = alt.Chart().encode(
        color=_colour(rows, group, names),
        opacity=alt.when(chosen).then(alt.value(1)).otherwise(_faint()),
    )
    line = base.mark_line(strokeWidth=1.5).encode(x=x.x(), y=y.y(), order="place:Q")
    if detail is not None:
        line = line.encode(detail=alt.Detail(detail, type="nominal"))
    points = base.mark_point(filled=True, size=95, strokeWidth=1).encode(
        x=x.x(),
        y=y.y(),
        shape=_shape(rows, group, names),
        tooltip=[*_labels([group, *labels]), *x.tooltips(), *y.tooltips()],
    )
    layers = [
        *_references(reference, x, y),
        *_bars(base, rows, x, y),
        line,
        points.add_params(chosen),
    ]
    placed = [{**row, "place": place} for place, row in enumerate(rows)]
    return _finished(alt.layer(*layers, height=_HEIGHT + 40), placed)


def curves(
    rows: Sequence[Row],
    x: Axis,
    y: Axis,
    group: str,
    *,
    labels: Sequence[str] = (),
    reference: tuple[float | None, float | None] = (None, None),
    points: bool = True,
    names: Sequence[str] = (),
) -> Spec:
    """A line for each group along x, with bands for the intervals of y."""
    chosen = alt.selection_point(fields=[group], bind="legend")
    base = alt.Chart().encode(
        color=_colour(rows, group, names),
        opacity=alt.when(chosen).then(alt.value(1)).otherwise(_faint()),
    )
    layers = _references(reference, x, y)
    if _has_intervals(rows, y):
        band = base.transform_filter(y.has_bounds()).mark_area(fillOpacity=0.14, strokeOpacity=0)
        layers.append(band.encode(x=x.x(), y=y.y(y.low), y2=alt.Y2(y.high)))
        bars = base.transform_filter(y.has_bounds()).mark_rule(strokeOpacity=0.5)
        layers.append(bars.encode(x=x.x(), y=y.y(y.low), y2=alt.Y2(y.high)))
    layers.append(base.mark_line(strokeWidth=1.8).encode(x=x.x(), y=y.y()))
    marks = base.mark_point(filled=True, size=70 if points else 24)
    tooltip = [*_labels([group, *labels]), *x.tooltips(), *y.tooltips()]
    spots = marks.encode(x=x.x(), y=y.y(), shape=_shape(rows, group, names), tooltip=tooltip)
    return _finished(alt.layer(*layers, spots.add_params(chosen), height=_HEIGHT), rows)


def heat_map(rows: Sequence[Row], row: str, column: str, value: Axis) -> Spec:
    """A coloured cell with its value for each pair of `row` and `column`, in order of appearance.

    Rows without a finite value, such as diverged runs, have an empty cell.
    """
    kept = [one for one in rows if _is_finite(one[value.field])]
    names = _names(rows, row), _names(rows, column)
    values = [one[value.field] for one in kept] or [0.0]
    domain = [min(values), max(values) if max(values) > min(values) else min(values) + 1]
    across = alt.X(
        column, type="nominal", sort=names[1], title=None, scale=alt.Scale(domain=names[1])
    )
    across = across.axis(orient="top", labelAngle=0, domain=False, ticks=False)
    down = alt.Y(row, type="nominal", sort=names[0], title=None, scale=alt.Scale(domain=names[0]))
    base = alt.Chart().encode(x=across, y=down.axis(domain=False, ticks=False, labelOverlap=False))

    def colour(steps: Sequence[str]) -> alt.Color:
        scale = alt.Scale(type="quantize", domain=domain, range=list(steps))
        return alt.Color(value.field, type="quantitative", scale=scale, legend=None)

    tooltip = [*_labels([row, column]), *value.tooltips()]
    cells = base.mark_rect(stroke=theme.PAPER, strokeWidth=2, cornerRadius=3)
    text = base.mark_text(fontSize=13)
    shown = alt.Text(value.field, type="quantitative", format=value.format)
    layers = alt.layer(
        cells.encode(color=colour(theme.HEAT), tooltip=tooltip),
        text.encode(color=colour(theme.HEAT_TEXT), text=shown),
        height=_CELL_HEIGHT * max(1, len(names[0])),
    ).resolve_scale(color="independent")
    return _finished(layers, kept)


def dominance(rows: Sequence[Row], value: Axis, group: str, *, names: Sequence[str] = ()) -> Spec:
    """Empirical distributions, from `dominance_rows`: the share of values at most x."""
    share = Axis("share", "share of values at or below", ".0%", zero=True)
    base = alt.Chart().encode(color=_colour(rows, group, names), x=value.x(), y=share.y())
    lines = base.mark_line(interpolate="step-after", strokeWidth=1.8)
    tooltip = [*_labels([group]), *value.tooltips(), *share.tooltips()]
    spots = base.mark_point(filled=True, opacity=1, size=9).encode(
        tooltip=tooltip, shape=_shape(rows, group, names)
    )
    return _finished(alt.layer(lines, spots, height=_HEIGHT), rows)


def dominance_rows(samples: Mapping[str, Sequence[float]], field: str, group: str) -> list[Row]:
    """Rows of `dominance`: sorted values of each sample with the share of values up to each.

    Of more than 200 values, 200 equally spaced ranks are kept.
    """
    rows: list[Row] = []
    for name, values in samples.items():
        ordered = sorted(value for value in values if _is_finite(value))
        count = len(ordered)
        ranks = range(1, count + 1)
        if count > _MOST_STEPS:
            ranks = [round(step * count / _MOST_STEPS) for step in range(1, _MOST_STEPS + 1)]
        rows += [{group: name, field: ordered[rank - 1], "share": rank / count} for rank in ranks]
    return rows


def intervals(
    rows: Sequence[Row],
    name: str,
    x: Axis,
    *,
    group: str | None = None,
    labels: Sequence[str] = (),
    reference: float | None = None,
    names: Sequence[str] = (),
) -> Spec:
    """A value with its interval on each line; one group per colour and shape."""
    lines = _names(rows, name)
    sides = alt.YOffset(group, type="nominal") if group is not None else alt.Undefined
    across = alt.Y(name, type="nominal", sort=lines, title=None, scale=alt.Scale(domain=lines))
    base = alt.Chart().encode(
        y=across.axis(domain=False, ticks=False, grid=True, labelLimit=210, labelOverlap=False)
    )
    base = base.encode(yOffset=sides, color=alt.value(theme.COLOURS[0]))
    shape: Any = alt.value("circle")
    if group is not None:
        base, shape = base.encode(color=_colour(rows, group, names)), _shape(rows, group, names)
    marks = base.mark_point(filled=True, opacity=1, size=90)
    chosen = [name, *([group] if group else []), *labels]
    tooltip = [*_labels(chosen), *x.tooltips()]
    height = _ROW_HEIGHT * max(1, len(lines)) * (len(_names(rows, group)) if group else 1)
    layers = _references((reference, None), x, x)
    if _has_intervals(rows, x):
        bars = base.transform_filter(x.has_bounds()).mark_rule(strokeWidth=2)
        layers.append(bars.encode(x=x.x(x.low).axis(titleAnchor="end"), x2=alt.X2(x.high)))
    layers.append(marks.encode(x=x.x().axis(titleAnchor="end"), shape=shape, tooltip=tooltip))
    return _finished(alt.layer(*layers, height=max(height, 80)), rows)


def agreement(
    rows: Sequence[Row],
    x: Axis,
    y: Axis,
    group: str,
    *,
    labels: Sequence[str] = (),
    names: Sequence[str] = (),
) -> Spec:
    """Points of two figures that should be equal, with the diagonal where they are."""
    ends = [one[axis.field] for one in rows for axis in (x, y) if _is_finite(one[axis.field])]
    low, high = (min(ends), max(ends)) if ends else (0.0, 1.0)
    line = alt.Chart(alt.Data(values=[{"at": low}, {"at": high}])).mark_line(
        color=theme.MUTED, strokeDash=[4, 4], strokeWidth=1.2
    )
    base = alt.Chart().encode(color=_colour(rows, group, names))
    marks = base.mark_point(filled=True, opacity=1, size=95)
    tooltip = [*_labels([group, *labels]), *x.tooltips(), *y.tooltips()]
    layers = [
        line.encode(x=x.x("at"), y=y.y("at")),
        *_bars(base, rows, x, y),
        marks.encode(x=x.x(), y=y.y(), shape=_shape(rows, group, names), tooltip=tooltip),
    ]
    return _finished(alt.layer(*layers, height=_HEIGHT), rows)


def columns(
    rows: Sequence[Row],
    x: Axis,
    y: Axis,
    *,
    reference: float | None = None,
    band: tuple[float, float] | None = None,
) -> Spec:
    """A bar for each row; dashed line at `reference`, shaded between the values of `band`."""
    layers: list[alt.Chart] = []
    if band is not None:
        limits = alt.Chart(alt.Data(values=[{"from": band[0], "to": band[1]}]))
        area = limits.mark_rect(color=theme.COLOURS[1], opacity=0.16)
        layers.append(area.encode(y=y.y("from"), y2=alt.Y2("to")))
    bars = alt.Chart().mark_bar(color=theme.COLOURS[0], opacity=0.85, cornerRadiusEnd=2)
    across = alt.X(x.field, type="ordinal", title=x.title, sort=None).axis(
        labelAngle=0, labelOverlap=True
    )
    layers.append(bars.encode(x=across, y=y.y(), tooltip=[*x.tooltips(), *y.tooltips()]))
    if _has_intervals(rows, y):
        whiskers = alt.Chart().transform_filter(y.has_bounds()).mark_rule(color=theme.INK)
        layers.append(whiskers.encode(x=across, y=y.y(y.low), y2=alt.Y2(y.high)))
    if reference is not None:
        rule = alt.Chart(alt.Data(values=[{"at": reference}])).mark_rule(
            color=theme.INK, strokeDash=[4, 4]
        )
        layers.append(rule.encode(y=y.y("at")))
    return _finished(alt.layer(*layers, height=_HEIGHT - 60), rows)


def _bars(base: alt.Chart, rows: Sequence[Row], x: Axis, y: Axis) -> list[alt.Chart]:
    """Intervals along both axes."""
    layers: list[alt.Chart] = []
    if _has_intervals(rows, x):
        across = base.transform_filter(x.has_bounds()).mark_rule(strokeOpacity=0.45)
        layers.append(across.encode(x=x.x(x.low), x2=alt.X2(x.high), y=y.y()))
    if _has_intervals(rows, y):
        up = base.transform_filter(y.has_bounds()).mark_rule(strokeOpacity=0.45)
        layers.append(up.encode(y=y.y(y.low), y2=alt.Y2(y.high), x=x.x()))
    return layers


def _references(at: tuple[float | None, float | None], x: Axis, y: Axis) -> list[alt.Chart]:
    layers: list[alt.Chart] = []
    for value, axis, across in ((at[0], x, True), (at[1], y, False)):
        if value is not None:
            rule = alt.Chart(alt.Data(values=[{"at": value}])).mark_rule(
                color=theme.MUTED, strokeDash=[4, 4], strokeWidth=1.2
            )
            placed = rule.encode(x=axis.x("at")) if across else rule.encode(y=axis.y("at"))
            layers.append(placed)
    return layers


def _colour(rows: Sequence[Row], group: str, names: Sequence[str]) -> alt.Color:
    names = list(names) or _names(rows, group)
    scale = alt.Scale(domain=names, range=theme.colours_of(names))
    return alt.Color(group, type="nominal", scale=scale, legend=_legend(rows, group))


def _shape(rows: Sequence[Row], group: str, names: Sequence[str]) -> alt.Shape:
    names = list(names) or _names(rows, group)
    scale = alt.Scale(domain=names, range=theme.shapes_of(names))
    return alt.Shape(group, type="nominal", scale=scale, legend=_legend(rows, group))


def _legend(rows: Sequence[Row], group: str) -> alt.Legend | None:
    """The names that occur; no legend for a single one."""
    names = _names(rows, group)
    return alt.Legend(values=names) if len(names) > 1 else None


def _faint() -> Any:
    return alt.value(0.12)


def _labels(names: Sequence[str]) -> list[alt.Tooltip]:
    return [alt.Tooltip(name, type="nominal", title=name.replace("_", " ")) for name in names]


def _names(rows: Sequence[Row], column: str) -> list[str]:
    return list(dict.fromkeys(row[column] for row in rows))


def _has_intervals(rows: Sequence[Row], axis: Axis) -> bool:
    """Whether any row has finite bounds; Vega warns of a layer without data."""
    if not axis.bounds:
        return False
    return any(_is_finite(row.get(axis.low)) and _is_finite(row.get(axis.high)) for row in rows)


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _finished(chart: alt.LayerChart | alt.FacetChart, rows: Sequence[Row]) -> Spec:
    """The specification with its data, the house configuration and the container's width."""
    data = [{key: _plain(value) for key, value in row.items()} for row in rows]
    whole = chart.properties(width="container", data=alt.Data(values=data))
    spec = whole.to_dict()
    spec.pop(_SCHEMA, None)
    return spec | {"config": theme.CONFIG, "autosize": {"type": "fit-x", "contains": "padding"}}


def _plain(value: Any) -> Any:
    """JSON has no infinite numbers and no NaN."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
