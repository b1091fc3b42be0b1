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
from typing import TYPE_CHECKING, Any

import altair as alt

from paceline.report.html import theme
from paceline.report.html.encodings import (
    Axis,
    colour_of,
    has_intervals,
    is_finite,
    labels_of,
    names_of,
    seen,
    shape_of,
    spoken,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline.report.html.page import Row

    Spec = dict[str, Any]

_HEIGHT = 320
_ROW_HEIGHT = 28
_CELL_HEIGHT = 46
_MOST_STEPS = 200  # of an empirical distribution
_SCHEMA = "$schema"  # a URL, which a page without network does not need


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
    base = alt.Chart().encode(color=colour_of(rows, group, names))
    line = base.mark_line(aria=False, strokeWidth=1.5).encode(
        x=x.x(), y=y.y(), order="place:Q", strokeOpacity=seen(chosen, 1)
    )
    if detail is not None:
        line = line.encode(detail=alt.Detail(detail, type="nominal"))
    points = base.mark_point(filled=True, size=95, strokeWidth=1).encode(
        x=x.x(),
        y=y.y(),
        shape=shape_of(rows, group, names),
        opacity=seen(chosen, 1),
        tooltip=[*labels_of([group, *labels]), *x.tooltips(), *y.tooltips()],
        description=spoken([group, *labels], x, y),
    )
    bars = _bars(base.encode(strokeOpacity=seen(chosen, 0.45)), rows, x, y)
    layers = [*_references(reference, x, y), *bars, line, points.add_params(chosen)]
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
    base = alt.Chart().encode(color=colour_of(rows, group, names))
    layers = _references(reference, x, y)
    if has_intervals(rows, y):
        band = base.transform_filter(y.has_bounds()).mark_area(aria=False, strokeOpacity=0)
        band = band.encode(fillOpacity=seen(chosen, 0.14))
        layers.append(band.encode(x=x.x(), y=y.y(y.low), y2=alt.Y2(y.high)))
        bars = base.transform_filter(y.has_bounds()).mark_rule(aria=False)
        bars = bars.encode(strokeOpacity=seen(chosen, 0.5))
        layers.append(bars.encode(x=x.x(), y=y.y(y.low), y2=alt.Y2(y.high)))
    line = base.mark_line(aria=False, strokeWidth=1.8)
    layers.append(line.encode(x=x.x(), y=y.y(), strokeOpacity=seen(chosen, 1)))
    marks = base.mark_point(filled=True, size=70 if points else 24)
    tooltip = [*labels_of([group, *labels]), *x.tooltips(), *y.tooltips()]
    spots = marks.encode(
        x=x.x(),
        y=y.y(),
        shape=shape_of(rows, group, names),
        opacity=seen(chosen, 1),
        tooltip=tooltip,
        description=spoken([group, *labels], x, y),
    )
    return _finished(alt.layer(*layers, spots.add_params(chosen), height=_HEIGHT), rows)


def heat_map(rows: Sequence[Row], row: str, column: str, value: Axis) -> Spec:
    """A coloured cell with its value for each pair of `row` and `column`, in order of appearance.

    Rows without a finite value, such as diverged runs, have an empty cell.
    """
    kept = [one for one in rows if is_finite(one[value.field])]
    names = names_of(rows, row), names_of(rows, column)
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

    tooltip = [*labels_of([row, column]), *value.tooltips()]
    cells = base.mark_rect(stroke=theme.PAPER, strokeWidth=2, cornerRadius=3)
    text = base.mark_text(aria=False, fontSize=13)
    shown = alt.Text(value.field, type="quantitative", format=value.format)
    layers = alt.layer(
        cells.encode(
            color=colour(theme.HEAT), tooltip=tooltip, description=spoken([row, column], value)
        ),
        text.encode(color=colour(theme.HEAT_TEXT), text=shown),
        height=_CELL_HEIGHT * max(1, len(names[0])),
    ).resolve_scale(color="independent")
    return _finished(layers, kept)


def dominance(rows: Sequence[Row], value: Axis, group: str, *, names: Sequence[str] = ()) -> Spec:
    """Empirical distributions, from `dominance_rows`: the share of values at most x."""
    share = Axis("share", "share of values at or below", ".0%", zero=True)
    base = alt.Chart().encode(color=colour_of(rows, group, names), x=value.x(), y=share.y())
    lines = base.mark_line(aria=False, interpolate="step-after", strokeWidth=1.8)
    tooltip = [*labels_of([group]), *value.tooltips(), *share.tooltips()]
    spots = base.mark_point(filled=True, opacity=1, size=9).encode(
        tooltip=tooltip,
        shape=shape_of(rows, group, names),
        description=spoken([group], value, share),
    )
    return _finished(alt.layer(lines, spots, height=_HEIGHT), rows)


def dominance_rows(samples: Mapping[str, Sequence[float]], field: str, group: str) -> list[Row]:
    """Rows of `dominance`: sorted values of each sample with the share of values up to each.

    Of more than 200 values, 200 equally spaced ranks are kept.
    """
    rows: list[Row] = []
    for name, values in samples.items():
        ordered = sorted(value for value in values if is_finite(value))
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
    beside: bool = True,
) -> Spec:
    """A value with its interval on each line; one group per colour and shape.

    `beside`: a line has a value of each group; False: each line is of one group.
    """
    lines = names_of(rows, name)
    within = group if beside else None
    sides = alt.Undefined if within is None else alt.YOffset(within, type="nominal")
    across = alt.Y(name, type="nominal", sort=lines, title=None, scale=alt.Scale(domain=lines))
    base = alt.Chart().encode(
        y=across.axis(domain=False, ticks=False, grid=True, labelLimit=210, labelOverlap=False)
    )
    base = base.encode(yOffset=sides, color=alt.value(theme.COLOURS[0]))
    shape: Any = alt.value("circle")
    if group is not None:
        base, shape = base.encode(color=colour_of(rows, group, names)), shape_of(rows, group, names)
    marks = base.mark_point(filled=True, opacity=1, size=90)
    chosen = [name, *([group] if group else []), *labels]
    tooltip = [*labels_of(chosen), *x.tooltips()]
    height = _ROW_HEIGHT * max(1, len(lines)) * (len(names_of(rows, within)) if within else 1)
    layers = _references((reference, None), x, x)
    if has_intervals(rows, x):
        bars = base.transform_filter(x.has_bounds()).mark_rule(aria=False, strokeWidth=2)
        layers.append(bars.encode(x=x.x(x.low).axis(titleAnchor="end"), x2=alt.X2(x.high)))
    marks = marks.encode(shape=shape, tooltip=tooltip, description=spoken(chosen, x))
    layers.append(marks.encode(x=x.x().axis(titleAnchor="end")))
    return _finished(alt.layer(*layers, height=max(height, 80)), rows)


def points(
    rows: Sequence[Row],
    x: Axis,
    y: Axis,
    group: str,
    *,
    labels: Sequence[str] = (),
    names: Sequence[str] = (),
    diagonal: bool = False,
) -> Spec:
    """Two figures of each row; `diagonal`: with the line where they are equal."""
    ends = [one[axis.field] for one in rows for axis in (x, y) if is_finite(one[axis.field])]
    low, high = (min(ends), max(ends)) if ends else (0.0, 1.0)
    line = alt.Chart(alt.Data(values=[{"at": low}, {"at": high}])).mark_line(
        aria=False, color=theme.MUTED, strokeDash=[4, 4], strokeWidth=1.2
    )
    base = alt.Chart().encode(color=colour_of(rows, group, names))
    marks = base.mark_point(filled=True, opacity=1, size=95)
    tooltip = [*labels_of([group, *labels]), *x.tooltips(), *y.tooltips()]
    layers = [
        *([line.encode(x=x.x("at"), y=y.y("at"))] if diagonal else []),
        *_bars(base.encode(strokeOpacity=alt.value(0.45)), rows, x, y),
        marks.encode(
            x=x.x(),
            y=y.y(),
            shape=shape_of(rows, group, names),
            tooltip=tooltip,
            description=spoken([group, *labels], x, y),
        ),
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
        area = limits.mark_rect(aria=False, color=theme.COLOURS[1], opacity=0.16)
        layers.append(area.encode(y=y.y("from"), y2=alt.Y2("to")))
    bars = alt.Chart().mark_bar(color=theme.COLOURS[0], opacity=0.85, cornerRadiusEnd=2)
    across = alt.X(x.field, type="ordinal", title=x.title, sort=None).axis(
        labelAngle=0, labelOverlap=True
    )
    bars = bars.encode(tooltip=[*x.tooltips(), *y.tooltips()], description=spoken([], x, y))
    layers.append(bars.encode(x=across, y=y.y()))
    if has_intervals(rows, y):
        whiskers = (
            alt.Chart().transform_filter(y.has_bounds()).mark_rule(aria=False, color=theme.INK)
        )
        layers.append(whiskers.encode(x=across, y=y.y(y.low), y2=alt.Y2(y.high)))
    if reference is not None:
        rule = alt.Chart(alt.Data(values=[{"at": reference}])).mark_rule(
            aria=False, color=theme.INK, strokeDash=[4, 4]
        )
        layers.append(rule.encode(y=y.y("at")))
    return _finished(alt.layer(*layers, height=_HEIGHT - 60), rows)


def _bars(base: alt.Chart, rows: Sequence[Row], x: Axis, y: Axis) -> list[alt.Chart]:
    """Intervals along both axes."""
    layers: list[alt.Chart] = []
    if has_intervals(rows, x):
        across = base.transform_filter(x.has_bounds()).mark_rule(aria=False)
        layers.append(across.encode(x=x.x(x.low), x2=alt.X2(x.high), y=y.y()))
    if has_intervals(rows, y):
        up = base.transform_filter(y.has_bounds()).mark_rule(aria=False)
        layers.append(up.encode(y=y.y(y.low), y2=alt.Y2(y.high), x=x.x()))
    return layers


def _references(at: tuple[float | None, float | None], x: Axis, y: Axis) -> list[alt.Chart]:
    layers: list[alt.Chart] = []
    for value, axis, across in ((at[0], x, True), (at[1], y, False)):
        if value is not None:
            rule = alt.Chart(alt.Data(values=[{"at": value}])).mark_rule(
                aria=False, color=theme.MUTED, strokeDash=[4, 4], strokeWidth=1.2
            )
            placed = rule.encode(x=axis.x("at")) if across else rule.encode(y=axis.y("at"))
            layers.append(placed)
    return layers


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
