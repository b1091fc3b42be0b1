"""Specifications of charts: what is drawn, and what is left out where it is unknown."""

import math
from typing import Any

import pytest

from paceline.core.bootstrap import Interval
from paceline.results import FIGURES
from paceline.view import charts
from paceline.view.charts import Axis
from paceline.view.page import number

X, Y = Axis("x", "cost"), Axis("y", "quality")
ROWS = [
    {"x": Interval(1.0, 0.9, 1.1), "y": Interval(2.0, 1.0, 3.0), "g": "one"},
    {"x": Interval(2.0, math.nan, math.nan), "y": Interval(1.0, 0.5, 1.5), "g": "two"},
]
EXACT = [one | {"x": number(one, "x")} for one in ROWS]
UNKNOWN = [{"x": 1.0, "y": 2.0, "g": "one"}, {"x": 2.0, "y": float("nan"), "g": "one"}]


@pytest.mark.parametrize(
    ("chart", "marks"),
    [
        (
            charts.frontier([one | {"gain": one["x"]} for one in ROWS], "gain", Y, "g"),
            ["rule", "rule", "rule", "line", "point"],
        ),
        (charts.curves(EXACT, X, Y, "g"), ["area", "rule", "line", "point"]),
        (charts.curves(UNKNOWN, X, Y, "g"), ["line", "point"]),
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


def test_a_chart_has_its_values_with_four_digits():
    rows = [one | {"x": number(one, "x") / 3, "detail": "l", "more": 1.0} for one in ROWS]
    chart = charts.frontier(rows, X, Y, "g", labels=["more"], detail="detail")
    assert [row["x"] for row in chart["data"]["values"]] == [0.3333, 0.6667]


def test_unknown_values_are_null():
    assert charts.curves(UNKNOWN, X, Y, "g")["data"]["values"][1]["y"] is None


def test_the_axis_of_a_figure_is_that_of_the_registry():
    axis = charts.axis_of("block_efficiency")
    assert (axis.field, axis.title) == ("block_efficiency", "tokens per target call (tau)")
    assert axis.format == FIGURES["block_efficiency"].format
    known = {name: charts.axis_of(name).at for name in ("speedup", "quality", "gain")}
    assert known == {"speedup": 1.0, "quality": None, "gain": 1.0}
    assert charts.axis_of("step").title == "optimizer step"
    assert charts.axis_of(Y) is Y


def test_a_figure_has_a_chart_for_each_value_of_a_column_with_the_same_colours():
    figure = charts.plotted("Title", "Text.", EXACT, charts.curves, X, Y, group="g", by="x")
    assert list(figure.panels) == ["x 1.0", "x 2.0"]
    drawn = [chart["data"]["values"] for chart in figure.panels.values()]
    assert [[row["y"] for row in rows] for rows in drawn] == [[2.0], [1.0]]
    layers = [layer for chart in figure.panels.values() for layer in chart["layer"]]
    colours = [layer["encoding"]["color"]["scale"] for layer in layers]
    assert all(one["domain"] == ["one", "two"] for one in colours)
