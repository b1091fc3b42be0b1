"""Figures of a bench besides its frontier: acceptance, seconds per token, predictions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.bench.schema import ORACLE, TARGET_ALONE, family, setting
from paceline.report.html import charts
from paceline.report.html.encodings import Axis
from paceline.report.html.page import Figure, Panel, bounded
from paceline.report.plots import curves as ordered_curves

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paceline.bench.measured_frontier import Frontier
    from paceline.bench.prediction import Prediction
    from paceline.bench.schema import ResultRow
    from paceline.report.html.page import Block, Row, Source

_MOST_SAMPLES = 6


def acceptance_figure(frontier: Frontier, source: Source) -> Figure | None:
    """Rejection rate of every cell with a rule; None if no cell examines drafted tokens."""
    rows: list[Row] = []
    for row in frontier.rows:
        rate = frontier.rejection_rate(row)
        if rate.value == rate.value:
            one: Row = {"setting": name_of(row), "family": family(row.decoding)}
            one |= bounded("rejection", rate) | bounded("calls", frontier.deferral_rate(row))
            rows.append(one)
    if not rows:
        return None
    rows.sort(key=lambda row: row["rejection"])
    rejected = Axis("rejection", "rejected / examined drafted tokens", ".2f", bounds=True)
    chart = charts.intervals(rows, "setting", rejected, labels=["family"])
    text = "Fewer rejections mean longer blocks. Sorted; bars are 95% intervals over examples."
    return Figure("Rejection rate by rule", text, [Panel(chart)], rows, source)


def seconds_figure(frontier: Frontier, source: Source) -> Figure | None:
    """Distributions over examples of ms per token: the target alone and each family's fastest."""
    samples: dict[str, list[float]] = {}
    alone = [
        1e3 * one.baseline.seconds / one.baseline.num_tokens
        for one in frontier.target.examples
        if one.baseline is not None and one.baseline.num_tokens
    ]
    samples["target alone"] = alone
    families = {
        name: max(cells, key=lambda row: frontier.speedup(row).value)
        for name, cells in frontier.families().items()
        if name != TARGET_ALONE and not name.startswith(ORACLE)
    }
    fastest = sorted(families.values(), key=lambda row: -frontier.speedup(row).value)
    for row in fastest[: _MOST_SAMPLES - 1]:
        samples[name_of(row)] = [
            1e3 * one.seconds / len(one.tokens)
            for one in row.examples
            if one.baseline is not None and one.tokens
        ]
    if len(alone) < 2 or len(samples) < 2:
        return None
    rows = charts.dominance_rows(samples, "ms per token", "decoding")
    axis = Axis("ms per token", "ms per token of a whole request", ".3~f")
    chart = charts.dominance(rows, axis, "decoding")
    text = (
        "Share of the examples that took at most this time per token: the target alone and the "
        "fastest setting of each family, whatever its quality. A curve further left is faster; if "
        "it is left everywhere, it is faster at every rank, not only on average. "
        f"n = {len(alone):,} timed examples."
    )
    return Figure("Time per token over examples", text, [Panel(chart)], rows, source)


def prediction_figures(
    frontier: Frontier, predictions: Mapping[str, Prediction], source: Source
) -> list[Block]:
    """Predicted against measured rejection rates and speedups; none without predictions."""
    rows: list[Row] = []
    for row in frontier.rows:
        found = predictions.get(row.key)
        if found is None:
            continue
        one: Row = {"family": family(row.decoding), "setting": setting(row.decoding) or "-"}
        one |= {"predicted rejection": found.predicted_rejection}
        one |= bounded("rejection", frontier.rejection_rate(row))
        one |= {"predicted speedup": found.predicted_speedup}
        one |= bounded("speedup", frontier.decoding_speedup(row))
        rows.append(one)
    if not rows:
        return []
    rejection = [
        row
        for row in rows
        if row["predicted rejection"] is not None and row["rejection"] == row["rejection"]
    ]
    speed = [row for row in rows if row["speedup"] == row["speedup"]]
    names = families_of(frontier)
    panels: list[Panel] = []
    for title, name, own, words in (
        ("Rejection rate", "rejection", rejection, "rejection rate"),
        ("Decoding speedup", "speedup", speed, "speedup after the first token"),
    ):
        if own:
            x = Axis(f"predicted {name}", f"predicted {words}", ".2f")
            y = Axis(name, f"measured {words}", ".2f", bounds=True)
            chart = charts.points(
                own, x, y, "family", labels=["setting"], names=names, diagonal=True
            )
            panels.append(Panel(chart, title))
    text = (
        "Predicted from one pass of both models over the target's answers, without decoding. On "
        "the dashed diagonal, prediction and measurement agree; bars are 95% intervals."
    )
    return [Figure("Predicted and measured", text, panels, rows, source)]


def families_of(frontier: Frontier) -> list[str]:
    """The families in the order of all charts."""
    return list(dict.fromkeys(curve.name for curve in ordered_curves(frontier)))


def name_of(row: ResultRow) -> str:
    """Family and setting of a cell."""
    return f"{family(row.decoding)} {setting(row.decoding)}".strip()
