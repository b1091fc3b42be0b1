"""Tables of a bench: the run, all cells, summaries by family, failed cells."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.bench.schema import SCHEMA_VERSION, TARGET_ALONE, family, setting
from paceline.core.bootstrap import LEAST_UNITS, Interval
from paceline.decode.strategies import ResponseByResponse
from paceline.report.markdown import NOTHING, figure, number, table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.bench.measured_frontier import Frontier, Reached
    from paceline.bench.schema import ResultRow
    from paceline.report.run_folder import Results, Section

NO_CELL = "no finished cell"
NOT_REACHED = "not reached"

QUALITY_COLUMNS = {
    "quality": "mean score of the answers, with its 95% interval.",
    "quality / target's": (
        "mean score / mean score of the target alone on the same examples; 1 by proof for lossless "
        "decoding."
    ),
}
SPEED_COLUMNS = {
    "speedup": (
        "seconds per token of the target alone / of this cell, for whole requests; both are timed "
        "interleaved on the same examples."
    ),
    "decoding speedup": "the same after the first token; `-` if whole answers arrive at once.",
    "relative latency": "1 / speedup.",
    "rejection rate": "rejected / examined drafted tokens.",
    "deferral rate": "target passes / tokens, without the prompt pass; 1 for the target alone.",
}
CELL_COLUMNS = {
    "family": "a rule or strategy without its threshold; autoregressive is the target alone.",
    "setting": "threshold, and gamma, the maximum number of drafted tokens per block.",
    **QUALITY_COLUMNS,
    **SPEED_COLUMNS,
}
SUMMARY_COLUMNS = {
    "family": "a rule or strategy with all its settings; oracle_cascade runs both models.",
    "cells": "finished settings.",
    "speedup at the target's quality": (
        "largest speedup of the cells with at least the target's quality. The cell is chosen on a "
        "random half of the examples; its figures are those of the other half, so that the best of "
        "many cells does not look better than it is."
    ),
    "setting (speedup)": "setting of the cell with this speedup.",
    "its quality / target's": "the same cell's, on the examples that did not choose it.",
    "best quality within the target's latency": (
        "best quality / target's of the cells that are at least as fast as the target; likewise."
    ),
    "setting (quality)": "setting of the cell with this quality.",
    "its speedup": "the same cell's, on the examples that did not choose it.",
}


def cells_table(section: Section, frontier: Frontier) -> str:
    """Table of all finished cells, by family and speedup; without quality if the task has none."""
    scored = frontier.target.metric is not None
    columns = cell_columns(scored=scored)
    rows = sorted(
        frontier.rows, key=lambda row: (family(row.decoding), -frontier.speedup(row).value)
    )
    lines = [_cell_line(frontier, row, scored=scored) for row in rows]
    for name in section.empty_families:
        lines.append([name, NO_CELL, *[NOTHING] * (len(columns) - 2)])
    return table(list(columns), lines)


def cell_columns(*, scored: bool) -> dict[str, str]:
    """Columns of `cells_table` with their definitions."""
    hidden = set() if scored else set(QUALITY_COLUMNS)
    return {name: text for name, text in CELL_COLUMNS.items() if name not in hidden}


def _cell_line(frontier: Frontier, row: ResultRow, *, scored: bool) -> list[str]:
    speedup = frontier.speedup(row)
    at_once = isinstance(row.decoding.strategy, ResponseByResponse)
    quality = [figure(frontier.quality(row)), figure(frontier.relative_quality(row))]
    return [
        family(row.decoding),
        setting(row.decoding) or NOTHING,
        *(quality if scored else []),
        figure(speedup),
        NOTHING if at_once else figure(frontier.decoding_speedup(row)),
        number(1 / speedup.value) if speedup.value else NOTHING,
        figure(frontier.rejection_rate(row)),
        figure(frontier.deferral_rate(row)),
    ]


def corpus_table(rows: Sequence[ResultRow]) -> str | None:
    """Table of figures of all answers together, such as corpus BLEU; None if there are none."""
    names = list(dict.fromkeys(name for row in rows for name in row.corpus_scores))
    if not names:
        return None
    ordered = sorted(rows, key=lambda row: family(row.decoding))
    lines = [
        [
            family(row.decoding),
            setting(row.decoding) or NOTHING,
            *(_corpus_figure(row, name) for name in names),
        ]
        for row in ordered
    ]
    return table(["family", "setting", *names], lines)


def _corpus_figure(row: ResultRow, name: str) -> str:
    if name not in row.corpus_scores:
        return NOTHING
    value, bounds = row.corpus_scores[name], row.corpus_intervals.get(name)
    return number(value) if bounds is None else figure(Interval(value, *bounds))


def summary_table(section: Section) -> str:
    """Summaries of each family as in table 2 of Narasimhan et al. 2024, or why there are none."""
    if (frontier := section.judged) is None:
        return section.silence or ""
    lines: list[list[str]] = []
    for name, cells in sorted(frontier.families().items()):
        if name != TARGET_ALONE:
            both = (frontier.fastest(cells, 1.0), frontier.finest(cells, 1.0))
            lines.append([name, str(len(cells)), *_reached(both[0]), *_reached(both[1])])
    for name in section.empty_families:
        lines.append([name, "0", *[NO_CELL, NOTHING, NOTHING] * 2])
    return table(list(SUMMARY_COLUMNS), lines)


def _reached(best: Reached | None) -> list[str]:
    if best is None:
        return [NOT_REACHED, NOTHING, NOTHING]
    return [figure(best.value), setting(best.row.decoding), figure(best.bound)]


def failed_table(rows: Sequence[ResultRow]) -> str:
    """Table of the failed cells with the reasons."""
    lines = [
        [family(row.decoding), setting(row.decoding) or NOTHING, row.error or "no reason recorded"]
        for row in rows
    ]
    return table(["family", "setting", "reason"], lines)


def run_lines(results: Results) -> list[str]:
    """Description of the run: cells, examples, configuration and environment."""
    done = [row for row in results.rows if row.status == "done"]
    num_missing = sum(len(section.missing) for section in results.sections)
    lines = [
        f"cells: {len(done)} finished, {len(results.rows) - len(done)} failed"
        + (f", {num_missing} of the grid not run yet" if num_missing else ""),
        f"context: {results.rows[-1].context}, rows of schema version {SCHEMA_VERSION}",
    ]
    if done:
        examples = done[0].examples
        num_timed = sum(example.baseline is not None for example in examples)
        lines.append(
            f"examples: {len(examples)}, of which {num_timed} were timed with the target alone; "
            f"metric: {done[0].metric or 'none'}"
        )
        lines += [f"{name}: {text}" for name, text in done[0].signatures.items()]
        if min(len(examples), num_timed) < 2 * LEAST_UNITS:
            lines.append(
                f"fewer than {2 * LEAST_UNITS} examples: half of them choose the best settings, "
                "and the other half are too few for intervals with 95% coverage"
            )
    if results.manifest is None:
        return [*lines, "no manifest.json: models, seed and machine are unknown"]
    config, environment = results.manifest["config"], results.manifest["environment"]
    return [*lines, *_facts(config, hidden=("grid", "output", "max_seconds")), *_facts(environment)]


def _facts(values: dict[str, Any], hidden: Sequence[str] = ()) -> list[str]:
    return [
        f"{name}: {_plain(value)}"
        for name, value in values.items()
        if name not in hidden and value is not None
    ]


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_plain(entry)}" for name, entry in value.items())
    return str(value)
