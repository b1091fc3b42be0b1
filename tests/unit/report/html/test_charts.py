"""Specifications of charts: what is drawn, and what is left out where it is unknown."""

from typing import Any

import pytest

from paceline.report.html import charts, theme
from paceline.report.html.encodings import Axis

X, Y = Axis("x", "cost", bounds=True), Axis("y", "quality", bounds=True)
ROWS = [
    {"x": 1.0, "x_low": 0.9, "x_high": 1.1, "y": 2.0, "y_low": 1.0, "y_high": 3.0, "g": "one"},
    {"x": 2.0, "x_low": None, "x_high": None, "y": 1.0, "y_low": 0.5, "y_high": 1.5, "g": "two"},
]


def marks(chart: dict[str, Any]) -> list[str]:
    return [
        layer["mark"] if isinstance(layer["mark"], str) else layer["mark"]["type"]
        for layer in chart["layer"]
    ]


def test_a_frontier_has_lines_points_intervals_and_the_reference():
    chart = charts.frontier(ROWS, X, Y, "g", reference=(1.0, None))
    assert marks(chart) == ["rule", "rule", "rule", "line", "point"]
    assert [row["place"] for row in chart["data"]["values"]] == [0, 1]


def test_curves_have_a_band_only_where_bounds_are_known():
    assert "area" in marks(charts.curves(ROWS, X, Y, "g"))
    unknown = [{"x": 1.0, "y": 2.0, "g": "one"}, {"x": 2.0, "y": float("nan"), "g": "one"}]
    chart = charts.curves(unknown, X, Y, "g")
    assert marks(chart) == ["line", "point"]
    assert chart["data"]["values"][1]["y"] is None


def test_groups_keep_colour_and_shape_when_some_are_absent():
    both = charts.curves(ROWS, X, Y, "g", names=["one", "two"])
    second = charts.curves(ROWS[1:], X, Y, "g", names=["one", "two"])
    scales = [chart["layer"][-1]["encoding"]["color"]["scale"] for chart in (both, second)]
    assert scales[0] == scales[1]


def test_no_two_of_many_groups_look_alike():
    names = [str(number) for number in range(24)]
    looks = set(zip(theme.colours_of(names), theme.shapes_of(names), strict=True))
    assert len(looks) == 24


def test_a_heat_map_keeps_the_order_of_rows_and_leaves_out_unknown_values():
    cells = [
        {"row": "b", "column": "x", "value": 0.5},
        {"row": "a", "column": "x", "value": float("nan")},
    ]
    chart = charts.heat_map(cells, "row", "column", Axis("value", "acceptance"))
    assert marks(chart) == ["rect", "text"]
    assert chart["layer"][0]["encoding"]["y"]["sort"] == ["b", "a"]
    assert [row["row"] for row in chart["data"]["values"]] == ["b"]


def test_an_empirical_distribution_ends_at_one():
    rows = charts.dominance_rows({"a": [3.0, 1.0, 2.0], "b": [5.0]}, "time", "side")
    assert [(row["side"], row["time"], row["share"]) for row in rows] == [
        ("a", 1.0, pytest.approx(1 / 3)),
        ("a", 2.0, pytest.approx(2 / 3)),
        ("a", 3.0, 1.0),
        ("b", 5.0, 1.0),
    ]
    assert marks(charts.dominance(rows, Axis("time", "seconds"), "side")) == ["line", "point"]


def test_a_large_sample_keeps_its_ends():
    rows = charts.dominance_rows({"a": [float(n) for n in range(1, 1001)]}, "time", "side")
    assert len(rows) == 200
    assert (rows[0]["time"], rows[-1]["time"], rows[-1]["share"]) == (5.0, 1000.0, 1.0)


def test_intervals_have_a_line_for_each_name_and_group():
    rows = [
        {"n": name, "g": side, "x": 1.0, "x_low": 0.5, "x_high": 1.5}
        for name in ("a", "b")
        for side in ("l", "r")
    ]
    chart = charts.intervals(rows, "n", X, group="g", reference=0.0)
    assert marks(chart) == ["rule", "rule", "point"]
    assert chart["layer"][-1]["encoding"]["yOffset"]["field"] == "g"


def test_agreement_draws_the_diagonal_over_both_figures():
    chart = charts.points(ROWS, X, Y, "g", diagonal=True)
    assert chart["layer"][0]["data"]["values"] == [{"at": 1.0}, {"at": 2.0}]


def test_columns_have_a_reference_and_a_band():
    rows = [{"x": 1, "y": 3.0}, {"x": 2, "y": 5.0}]
    chart = charts.columns(rows, Axis("x", "cell"), Axis("y", "count"), reference=4, band=(3, 5))
    assert marks(chart) == ["rect", "bar", "rule"]


def test_no_chart_names_an_address():
    assert "http" not in str(charts.frontier(ROWS, X, Y, "g"))
