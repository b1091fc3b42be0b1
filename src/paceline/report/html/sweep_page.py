"""Page of `paceline sweep`: heat maps of the grid, and differences to the reference."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from paceline.core.bootstrap import Interval, mean_interval
from paceline.report.html import charts
from paceline.report.html.encodings import Axis
from paceline.report.html.made_by import source_of
from paceline.report.html.page import Fact, Figure, Page, Panel, Section, Table, bounded

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline.report.html.page import Block, Row, Source

_NAMES = {
    "expected_acceptance": "expected acceptance",
    "rule_acceptance": "acceptance under the rule",
    "block_efficiency": "tokens per target call",
    "greedy_agreement": "greedy agreement",
    "rule_tvd": "distance to the rule's target (TVD)",
}
_ALL = "all columns"


class _Grid:
    """The figures of a sweep by row, column and seed; NaN for runs that diverged."""

    def __init__(self, runs: Sequence[Mapping[str, Any]], figure: str) -> None:
        self.figure = figure
        self.rows = list(dict.fromkeys(run["row"] for run in runs))
        self.columns = list(dict.fromkeys(run["column"] for run in runs))
        self.seeds = list(dict.fromkeys(run["seed"] for run in runs))
        self._values = {
            (run["row"], run["column"], run["seed"]): (run.get("after") or {}).get(figure, math.nan)
            for run in runs
        }

    def cell(self, row: str, column: str) -> Interval:
        """Mean over seeds, with its interval."""
        return _interval(self._of(row, column))

    def difference(self, row: str, other: str, columns: Sequence[str]) -> Interval:
        """Row - other, paired by column and seed; columns are averaged first."""
        parts = [
            [one - two for one, two in zip(self._of(row, name), self._of(other, name), strict=True)]
            for name in columns
        ]
        return _interval([sum(both) / len(both) for both in zip(*parts, strict=True)])

    def _of(self, row: str, column: str) -> list[float]:
        return [self._values.get((row, column, seed), math.nan) for seed in self.seeds]


def _interval(values: Sequence[float]) -> Interval:
    if len(values) < 2:
        return Interval(values[0], math.nan, math.nan)
    return mean_interval(torch.tensor(values, dtype=torch.float64))


def sweep_page(
    runs: Sequence[Mapping[str, Any]],
    config: Mapping[str, Any] | None = None,
    environment: Mapping[str, Any] | None = None,
) -> Page:
    """The page of the rows of `sweep.json`.

    `config`: of the sweep; None if it is unknown, then the first figure and row are the main ones.
    """
    source = source_of("sweep", config, environment)
    figures = [name for name in _NAMES if any(name in (run.get("after") or {}) for run in runs)]
    main = (config or {}).get("figure") or (figures[0] if figures else "expected_acceptance")
    grids = [_Grid(runs, name) for name in dict.fromkeys([main, *figures])]
    reference = (config or {}).get("reference") or grids[0].rows[0]
    sections = [_section(grid, reference, source) for grid in grids]
    sections.append(_runs(runs, source))
    grid = grids[0]
    return Page(
        title="Alignment runs compared",
        verdict=_verdict(grid),
        facts=[
            Fact("rows by columns", f"{len(grid.rows)} by {len(grid.columns)}"),
            Fact("seeds", str(len(grid.seeds))),
            Fact("runs that diverged", str(sum("diverged" in run for run in runs))),
        ],
        sections=sections,
        about=["Intervals are Student's 95% intervals over seeds; few seeds give wide ones."],
    )


def _verdict(grid: _Grid) -> str:
    """The best row over all columns, and whether it is better than the second."""
    name = _NAMES.get(grid.figure, grid.figure)
    lower = grid.figure == "rule_tvd"

    def mean(row: str) -> float:
        return sum(grid.cell(row, column).value for column in grid.columns) / len(grid.columns)

    ranked = sorted((row for row in grid.rows if math.isfinite(mean(row))), key=mean)
    if not ranked:
        return "Every row has a run that diverged."
    ranked = ranked if lower else ranked[::-1]
    best = ranked[0]
    text = f"The best {name} is that of {_words(best)}, {mean(best):.3f} on average"
    if len(ranked) == 1:
        return f"{text}."
    gap = grid.difference(best, ranked[1], grid.columns)
    sure = gap.high < 0 if lower else gap.low > 0
    standing = "ahead of" if sure else "not clearly ahead of"
    bounds = f"{gap.value:+.3f}, {gap.low:+.3f} to {gap.high:+.3f}"
    return f"{text}, {standing} {_words(ranked[1])} ({bounds})."


def _section(grid: _Grid, reference: str, source: Source) -> Section:
    name = _NAMES.get(grid.figure, grid.figure)
    cells: list[Row] = [
        {"row": _words(row), "column": _words(column), **bounded("value", grid.cell(row, column))}
        for row in grid.rows
        for column in grid.columns
    ]
    value = Axis("value", name, ".3f", bounds=True)
    text = f"Mean over {len(grid.seeds)} seeds of the aligned draft on held-out text."
    heat = charts.heat_map(cells, "row", "column", value)
    blocks: list[Block] = [
        Figure(f"{name.capitalize()} of each cell", text, [Panel(heat)], cells, source)
    ]
    others = [row for row in grid.rows if row != reference]
    if others:
        blocks.append(_differences(grid, others, reference, source))
    terms = [term for term in (name, "95% interval") if term in _TERMS]
    if grid.figure == "block_efficiency":
        terms = ["block efficiency", *terms]
    return Section(name.capitalize(), blocks, terms)


_TERMS = {"expected acceptance", "greedy agreement", "95% interval"}


def _differences(grid: _Grid, others: Sequence[str], reference: str, source: Source) -> Figure:
    spans = {_words(column): [column] for column in grid.columns}
    if len(spans) > 1:
        spans[_ALL] = grid.columns
    rows: list[Row] = [
        {
            "row": _words(row),
            "column": span,
            **bounded("difference", grid.difference(row, reference, columns)),
        }
        for row in others
        for span, columns in spans.items()
    ]
    x = Axis("difference", f"difference to {_words(reference)}", "+.3f", bounds=True)
    chart = charts.intervals(rows, "row", x, group="column", reference=0.0)
    text = (
        f"Row - {_words(reference)}, paired by column and seed, with the 95% interval over seeds. "
        "A difference whose interval crosses the dashed line is not established."
    )
    name = _NAMES.get(grid.figure, grid.figure)
    title = f"Difference in {name} to {_words(reference)}"
    return Figure(title, text, [Panel(chart)], rows, source)


def _runs(runs: Sequence[Mapping[str, Any]], source: Source) -> Section:
    rows: list[Row] = []
    for run in runs:
        figures = run.get("after") or {}
        row: Row = {
            "row": _words(run["row"]),
            "column": _words(run["column"]),
            "seed": str(run["seed"]),
        }
        row |= {_NAMES[name]: figures[name] for name in _NAMES if name in figures}
        row |= {"steps": run.get("num_steps"), "seconds": run.get("elapsed_s")}
        if "diverged" in run:
            row["diverged"] = run["diverged"]
        rows.append(row)
    return Section("All runs", [Table("Each run", rows, source)])


def _words(name: str) -> str:
    return str(name).replace("_", " ")
