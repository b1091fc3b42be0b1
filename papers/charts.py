"""Charts of the papers' pages, as SVG beside the README."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import altair as alt
import pandas as pd

from papers.statistics import interval

if TYPE_CHECKING:
    from collections.abc import Sequence


def means(rows: pd.DataFrame, keys: Sequence[str], values: Sequence[str]) -> pd.DataFrame:
    """Mean over draws of each group, with 95% intervals as `VALUE low` and `VALUE high`."""
    lines: list[dict[str, Any]] = []
    for key, own in rows.groupby(list(keys), dropna=False):
        line: dict[str, Any] = dict(zip(keys, key, strict=True))
        for value in values:
            found = interval(list(own[value]), 0.05)
            line |= {value: found.mean, f"{value} low": found.low, f"{value} high": found.high}
        lines.append(line)
    return pd.DataFrame(lines)


def line_chart(
    table: pd.DataFrame, x: str, y: str, color: str, facet: str, order: str
) -> alt.FacetChart:
    """Lines with points and intervals of y, a panel for each value of `facet`."""
    base = alt.Chart(table).encode(
        x=alt.X(f"{x}:Q").scale(zero=False),
        y=alt.Y(f"{y}:Q").scale(zero=False),
        color=alt.Color(f"{color}:N").title(None),
    )
    bars = base.mark_rule(opacity=0.5).encode(y=alt.Y(f"{y} low:Q").title(y), y2=f"{y} high:Q")
    panels = base.mark_line(point=True).encode(order=f"{order}:Q") + bars
    return panels.properties(width=420, height=280).facet(column=f"{facet}:N")
