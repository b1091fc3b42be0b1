"""Tables of a bench: what it was, every cell, the two summaries of the trade-off, failed cells."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.bench.schema import SCHEMA_VERSION, family, setting
from paceline.core.bootstrap import LEAST_UNITS
from paceline.decode.strategies import ResponseByResponse
from paceline.report.markdown import NOTHING, figure, number, table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.bench.measured_frontier import Frontier, Reached
    from paceline.bench.schema import ResultRow
    from paceline.report.run_folder import Results, Section

TARGET_ALONE = "autoregressive"
HEAD_ROOM = "oracle_cascade"
NO_CELL = "no finished cell"
NOT_REACHED = "not reached"

QUALITY_COLUMNS = {
    "quality": "mean score of the answers, with its 95% interval.",
    "quality / target's": "mean score / mean score of the target alone on the same examples.",
}
SPEED_COLUMNS = {
    "speedup": (
        "seconds a token of the target alone / of this cell, whole requests with their prompts, "
        "both timed in turn on the same examples."
    ),
    "decoding speedup": (
        "the same from the first token on; nothing is said where a whole answer comes at once."
    ),
    "relative latency": "1 / speedup: seconds a token as part of the target's.",
    "rejection rate": "drafted tokens that were judged and did not stay / judged ones.",
    "deferral rate": "target passes after the prompt's / tokens after the first; 1 is the target.",
}
CELL_COLUMNS = {
    "family": "a rule or strategy, all but its threshold; autoregressive is the target alone.",
    "setting": "the threshold, and gamma, the most tokens that a block drafts.",
    **QUALITY_COLUMNS,
    **SPEED_COLUMNS,
}
SUMMARY_COLUMNS = {
    "family": (
        "a rule or strategy with all its settings; oracle_cascade is head-room, it runs both models."
    ),
    "cells": "finished settings of the family; of more, the best looks better by luck alone.",
    "speedup at the target's quality": (
        "the fastest of the cells whose quality is at least the target's; its 95% interval is that "
        "of the fastest in each resample that has one."
    ),
    "its setting": "of the cell that has this speedup in the data.",
    "share": "of the resamples in which some cell of the family meets the condition.",
    "best quality within the target's latency": (
        "the best quality / target's of the cells that are no slower than the target, likewise."
    ),
    "setting of that": "of the cell that has this quality in the data.",
    "share of that": "of the resamples in which some cell is no slower than the target.",
}


def cells_table(section: Section, frontier: Frontier) -> str:
    """Every finished cell, by family and then the fastest first; without quality if there is none."""
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
    """The columns of `cells_table`, each with its definition."""
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


def summary_table(section: Section) -> str:
    """Both summaries of each family, or one line that says why there are none.

    They are those of Narasimhan et al. 2024, table 2.
    """
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
    return [figure(best.value), setting(best.row.decoding), f"{best.share:.0%}"]


def failed_table(rows: Sequence[ResultRow]) -> str:
    """Failed cells, each with its reason in a line."""
    lines = [
        [family(row.decoding), setting(row.decoding) or NOTHING, row.error or "no reason recorded"]
        for row in rows
    ]
    return table(["family", "setting", "reason"], lines)


def run_lines(results: Results) -> list[str]:
    """What was measured, on what, by what: a list of facts."""
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
            f"examples: {len(examples)}, of which {num_timed} were timed beside the target alone; "
            f"metric: {done[0].metric or 'none'}"
        )
        if min(len(examples), num_timed) < LEAST_UNITS:
            lines.append(
                f"fewer than {LEAST_UNITS} examples: the intervals are narrower than 95% intervals are"
            )
    if results.manifest is None:
        return [*lines, "there is no manifest.json: models, seed and machine are not known"]
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
