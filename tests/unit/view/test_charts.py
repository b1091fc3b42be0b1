"""Specifications of charts: what is drawn, and what is left out where it is unknown."""

import math
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.core.bootstrap import Interval
from paceline.results import FIGURES
from paceline.view import charts
from paceline.view.charts import Axis
from paceline.view.page import Panel, number

X, Y = Axis("x", "cost"), Axis("y", "quality")
ROWS = [
    {"x": Interval(1.0, 0.9, 1.1), "y": Interval(2.0, 1.0, 3.0), "g": "one"},
    {"x": Interval(2.0, math.nan, math.nan), "y": Interval(1.0, 0.5, 1.5), "g": "two"},
]
EXACT = [one | {"x": number(one, "x")} for one in ROWS]
UNKNOWN = [{"x": 1.0, "y": 2.0, "g": "one"}, {"x": 2.0, "y": float("nan"), "g": "one"}]
SIDES = [{"n": name, "x": Interval(1.0, 0.5, 1.5)} for name in ("a", "b")]


@pytest.mark.parametrize(
    ("chart", "marks"),
    [
        (
            charts.frontier(ROWS, replace(X, at=1.0), Y, "g"),
            ["rule", "rule", "rule", "line", "point"],
        ),
        (charts.curves(EXACT, X, Y, "g"), ["area", "rule", "line", "point"]),
        (charts.curves(UNKNOWN, X, Y, "g"), ["line", "point"]),
        (charts.points(ROWS, X, Y, "g", diagonal=True), ["line", "rule", "rule", "point"]),
        (charts.intervals(SIDES, "n", replace(X, at=0.0)), ["rule", "rule", "point"]),
        (charts.columns(UNKNOWN[:1], X, replace(Y, at=4), band=(3, 5)), ["rect", "bar", "rule"]),
    ],
)
def test_a_chart_has_the_marks_of_its_kind(chart: dict[str, Any], marks: list[str]):
    drawn = [layer["mark"] for layer in chart["layer"]]
    assert [mark if isinstance(mark, str) else mark["type"] for mark in drawn] == marks
    assert "http" not in str(chart)


def test_groups_keep_colour_and_shape_when_some_are_absent():
    both, second = (
        charts.curves(rows, X, Y, "g", names=["one", "two"])["layer"][-1]["encoding"]
        for rows in (ROWS, ROWS[1:])
    )
    assert both["color"]["scale"] == second["color"]["scale"]
    assert both["shape"]["scale"] == second["shape"]["scale"]
    names = [str(number) for number in range(24)]
    assert len(set(zip(charts.colours_of(names), charts.shapes_of(names), strict=True))) == 24


def test_a_chart_keeps_the_columns_that_it_draws_with_four_digits():
    rows = [
        one | {"x": number(one, "x") / 3, "detail": "l", "more": 1.0, "not drawn": 2.0}
        for one in ROWS
    ]
    chart = charts.frontier(rows, X, Y, "g", labels=["more"], detail="detail")
    names = {"x", "y", "y_low", "y_high", "g", "more", "detail", "place"}
    assert set(chart["data"]["values"][0]) == names
    assert [row["x"] for row in chart["data"]["values"]] == [0.3333, 0.6667]


def test_unknown_values_are_null_and_lines_keep_their_order():
    assert charts.curves(UNKNOWN, X, Y, "g")["data"]["values"][1]["y"] is None
    chart = charts.intervals(SIDES[::-1], "n", X)
    assert chart["layer"][-1]["encoding"]["y"]["sort"] == ["b", "a"]


def test_the_diagonal_spans_both_figures():
    chart = charts.points(ROWS, X, Y, "g", diagonal=True)
    assert chart["layer"][0]["data"]["values"] == [{"at": 1.0}, {"at": 2.0}]


def test_the_axis_of_a_figure_is_that_of_the_registry():
    axis = charts.axis_of("block_efficiency")
    assert (axis.field, axis.title) == ("block_efficiency", "tokens per target call (tau)")
    assert axis.format == FIGURES["block_efficiency"].format
    known = {name: charts.axis_of(name).at for name in ("speedup", "quality", "gain")}
    assert known == {"speedup": 1.0, "quality": None, "gain": 1.0}
    assert charts.axis_of("step").title == "optimizer step"
    assert charts.axis_of(Y) is Y


def test_a_figure_has_a_chart_for_each_value_of_a_column_with_the_same_colours():
    figure = charts.plotted("Title", "Text.", EXACT, charts.points, X, Y, group="g", by="x")
    assert [panel.title for panel in figure.panels] == ["x 1.0", "x 2.0"]
    drawn = [panel.chart["data"]["values"] for panel in figure.panels]
    assert [[row["y"] for row in rows] for rows in drawn] == [[2.0], [1.0]]
    layers = [layer for panel in figure.panels for layer in panel.chart["layer"]]
    colours = [layer["encoding"]["color"]["scale"] for layer in layers]
    assert all(one["domain"] == ["one", "two"] for one in colours)


def test_a_figure_has_a_chart_for_each_column_that_has_values():
    rows = [row | {"nowhere": None, "once": place or None} for place, row in enumerate(ROWS)]
    columns = {"Cost": "x", "Missing": "nowhere", "Once": "once", "Absent": "absent"}
    figure = charts.plotted("Title", "Text.", rows, charts.frontier, columns, Y, group="g")
    assert [panel.title for panel in figure.panels] == ["Cost", "Once"]
    assert [len(panel.chart["data"]["values"]) for panel in figure.panels] == [2, 1]
    assert figure.rows == rows


@pytest.mark.slow
def test_charts_become_one_image_in_the_colours_of_the_light_theme(tmp_path: Path):
    panels = [Panel(charts.curves(ROWS, X, Y, "g"), f"gamma {gamma}") for gamma in (3, 5)]
    charts.save(panels, tmp_path / "plot.png", columns=2)
    image = (tmp_path / "plot.png").read_bytes()
    assert struct.unpack(">I", image[16:20])[0] > 2 * 520
    assert charts.in_light_colours("var(--c1) var(--ink)") == ("#1f5fa8 #1d2026")
