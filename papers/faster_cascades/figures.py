"""Tables, charts and verdicts of Faster Cascades, from the committed rows alone."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd

from papers.charts import line_chart, means
from papers.statistics import interval

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import altair as alt


TASKS = ("sums",)
TARGET, LOSSLESS = "autoregressive", "lossless"


class Point(NamedTuple):
    """A setting: its target calls / tokens, and its accuracy."""

    calls: float
    accuracy: float


def points(rows: pd.DataFrame, families: Iterable[str]) -> list[Point]:
    """The settings of the families in the rows of one draw and temperature.

    Lossless decoding has the accuracy of the target by proof, and the target one call a token.
    """
    lines = rows.to_dict("records")
    exact = next(row["score"] / row["n"] for row in lines if row["family"] == TARGET)
    found: list[Point] = []
    for family in families:
        for row in (row for row in lines if row["family"] == family):
            calls = 1.0 if family == TARGET else row["calls"] / row["emitted"]
            accuracy = exact if family in (TARGET, LOSSLESS) else row["score"] / row["n"]
            found.append(Point(calls, accuracy))
    return found


def calls_at(settings: Sequence[Point], accuracy: float) -> float:
    """The fewest calls of a mixture of two settings that has this accuracy; NaN if none has.

    To draw one of two settings for each request gives any point between them.
    """
    enough = [one.calls for one in settings if one.accuracy >= accuracy]
    mixed = [
        above.calls
        + (above.accuracy - accuracy)
        / (above.accuracy - below.accuracy)
        * (below.calls - above.calls)
        for above, below in itertools.permutations(settings, 2)
        if above.accuracy >= accuracy > below.accuracy
    ]
    return min([*enough, *mixed], default=math.nan)


def accuracy_at(settings: Sequence[Point], calls: float) -> float:
    """The best accuracy of a mixture of two settings with at most this many calls; NaN if none."""
    few = [one.accuracy for one in settings if one.calls <= calls]
    mixed = [
        below.accuracy
        + (calls - below.calls) / (above.calls - below.calls) * (above.accuracy - below.accuracy)
        for above, below in itertools.permutations(settings, 2)
        if above.calls > calls >= below.calls
    ]
    return max([*few, *mixed], default=math.nan)


def accuracy_of(rows: pd.DataFrame, family: str, alpha: float) -> float:
    """The accuracy of a family's setting with this alpha in one draw; the target has none."""
    own = (row for row in rows.to_dict("records") if row["family"] == family)
    fitting = (row for row in own if math.isnan(row["alpha"]) or row["alpha"] == alpha)
    return next(row["score"] / row["n"] for row in fitting)


def shuffled(rows: pd.DataFrame, drawn: np.random.Generator) -> pd.DataFrame:
    """The rows of one draw with the names of settings shuffled; lossless decoding keeps its own."""
    order = np.arange(len(rows))
    (others,) = np.nonzero(rows["family"] != LOSSLESS)
    order[others] = drawn.permutation(others)
    return rows.assign(**{name: rows[name].to_numpy()[order] for name in ("family", "alpha")})


def statistic(
    rows: pd.DataFrame, how: dict[str, Any], task: str, drawn: np.random.Generator | None = None
) -> pd.Series:
    """A claim's number of each draw.

    `drawn`: with it, the names of settings are shuffled, or of calls the two sides: these have
    unlike ends, which settings in any order would not make alike.
    """
    del task
    chosen = rows[rows["temperature"] == 1]
    draws: dict[int, pd.DataFrame] = {int(draw): own for draw, own in chosen.groupby("draw")}
    if "accuracy" in how:
        if drawn is not None:
            draws = {draw: shuffled(own, drawn) for draw, own in draws.items()}
        values = {
            draw: accuracy_of(own, how["first"][0], how["accuracy"])
            - accuracy_of(own, how["second"][0], how["accuracy"])
            for draw, own in draws.items()
        }
    else:
        sides = itertools.repeat(1.0) if drawn is None else drawn.choice([-1.0, 1.0], len(draws))
        values = {
            draw: side * _log_calls(own, how)
            for side, (draw, own) in zip(sides, draws.items(), strict=drawn is not None)
        }
    return pd.Series(values, name="value").rename_axis("draw")


def _log_calls(rows: pd.DataFrame, how: dict[str, Any]) -> float:
    level = how["calls"]
    if isinstance(level, dict):
        accuracy = accuracy_at(points(rows, [level["of"], TARGET]), level["with_calls"])
        accuracy = min(accuracy, points(rows, [TARGET])[0].accuracy)
    else:
        accuracy = level * points(rows, [TARGET])[0].accuracy
    first, second = (calls_at(points(rows, how[side]), accuracy) for side in ("first", "second"))
    return math.log(first / second) if first > 0 and second > 0 else math.nan


def tables(rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Table 2 and Figures 1 to 3 and 7: calls at an accuracy, and the figures of each setting."""
    return {"calls": table_2(rows), "settings": settings(rows)}


def charts(rows: pd.DataFrame) -> dict[str, alt.FacetChart]:
    """Figures 1 to 3 and 7: accuracy against calls, a line for each family."""
    shown = averages(rows).assign(alpha=lambda table: table["alpha"].fillna(0))
    return {"frontier": line_chart(shown, "calls", "accuracy", "family", "garden", "alpha")}


def averages(rows: pd.DataFrame) -> pd.DataFrame:
    """Calls / tokens, accuracy and rejected / examined, means over draws with 95% intervals."""
    table = rows.assign(
        calls=rows["calls"] / rows["emitted"],
        accuracy=rows["score"] / rows["n"],
        rejections=rows["rejected"] / rows["examined"],
    )
    return means(table, ["garden", "family", "alpha"], ["calls", "accuracy", "rejections"])


def table_2(rows: pd.DataFrame) -> pd.DataFrame:
    """Target calls / tokens at 0.95 of the target's accuracy and at all of it, of each family."""
    lines = []
    for garden, own in rows.groupby("garden"):
        for family in sorted(set(own["family"])):
            line = {"garden": garden, "family": family}
            for part in (0.95, 1.0):
                values = [
                    calls_at(points(one, [family]), part * points(one, [TARGET])[0].accuracy)
                    for _, one in own.groupby("draw")
                ]
                known = [value for value in values if math.isfinite(value)]
                found = interval(known, 0.05) if known else None
                line[f"calls at {part:.0%}"] = (
                    "-"
                    if found is None
                    else f"{found.mean:.3f} ({len(known)} of {len(values)} draws)"
                )
            lines.append(line)
    return pd.DataFrame(lines)


def settings(rows: pd.DataFrame) -> pd.DataFrame:
    """The averages as text."""
    table = averages(rows)
    for value in ("calls", "accuracy", "rejections"):
        half = table[value] - table[f"{value} low"]
        table[value] = [
            f"{one:.3f} ±{error:.3f}" for one, error in zip(table[value], half, strict=True)
        ]
    return table[["garden", "family", "alpha", "calls", "accuracy", "rejections"]]
