"""Colours and the Vega-Lite configuration of all charts.

Every colour is a CSS variable, which Vega's SVG renderer passes on: the style sheet alone switches
between light, dark and print, and charts are not drawn again.
"""

from __future__ import annotations

from typing import Any

NUM_COLOURS = 8
NUM_STEPS = 7  # of a heat map; a discrete scale, because variables cannot be interpolated
SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down")

INK, MUTED, LINE, PAPER = (f"var(--{name})" for name in ("ink", "muted", "line", "paper"))
COLOURS = tuple(f"var(--c{number})" for number in range(1, NUM_COLOURS + 1))
HEAT = tuple(f"var(--heat{step})" for step in range(NUM_STEPS))
HEAT_TEXT = tuple(f"var(--heat-text{step})" for step in range(NUM_STEPS))

_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"

CONFIG: dict[str, Any] = {
    "background": "transparent",
    "font": _FONT,
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
        "titleColor": MUTED,
        "labelFontSize": 12.5,
        "labelLimit": 280,
        "symbolSize": 80,
        "title": None,
    },
    "text": {"color": INK, "fontSize": 12},
}


def colours_of(names: list[str]) -> list[str]:
    """A colour for each name, repeated if there are many: shapes tell those apart."""
    return [COLOURS[number % NUM_COLOURS] for number in range(len(names))]


def shapes_of(names: list[str]) -> list[str]:
    """A shape for each name; no two of 24 names share both colour and shape."""
    return [
        SHAPES[(number % NUM_COLOURS + 2 * (number // NUM_COLOURS)) % len(SHAPES)]
        for number in range(len(names))
    ]
