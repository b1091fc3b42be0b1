"""Tables of a measurement for its page and for the terminal."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from paceline.view.definitions import words_of
from paceline.view.page import table_of

if TYPE_CHECKING:
    from paceline.measure import Measurement
    from paceline.view.page import Row, Table

ACCEPTANCE = ("expected_acceptance", "greedy_draft_acceptance", "greedy_agreement")
_BREAK_EVEN = words_of("break_even_acceptance")
_SPEEDUPS = ("predicted_speedup", "block_cost_ratio", "expected_speedup", "mbsu")
_IN_ENGINE = ("block_efficiency", "needed_block_efficiency", "break_even_acceptance")


def gamma_table(found: Measurement, *, with_intervals: bool = False) -> Table:
    """A line per gamma: tokens per target call, what a speedup needs, and expected speedups.

    Without costs, the figures that need them are left out.
    """
    rows = [row for row in found.rows() if "gamma" in row.setting and "timed" not in row.setting]
    figures = ("block_efficiency", "break_even_acceptance", *_SPEEDUPS)
    if found.cost.engine:
        figures = (*_IN_ENGINE, "expected_speedup")
    elif with_intervals:
        figures = ("block_efficiency_iid", *figures)
    table = table_of(
        rows,
        ("gamma",),
        figures,
        bare=() if with_intervals else figures,
        title="Predictions for each gamma" if with_intervals else "",
        units="prompts",
        seed=found.config.seed,
    )
    lines: list[Row] = []
    for row, line in zip(rows, table.rows, strict=True):
        gamma = row.setting["gamma"]
        named = line | {"gamma": f"{gamma}*" if gamma == found.best_gamma else str(gamma)}
        if found.verdict.timed and "break_even_acceptance" not in row.totals:
            named[_BREAK_EVEN] = "none"
        if found.cost.engine:
            known = "" if gamma in found.timed_gammas else " ~"
            named["block"] = f"{row.totals['block_s'] * 1e3:.1f} ms{known}"
        lines.append(named)
    columns = {"*": "the gamma to serve, if the verdict is GO."}
    if found.cost.engine:
        columns["block"] = "time per block in the engine, drafting included; ~: interpolated."
    return dataclasses.replace(table, rows=lines, columns=columns)
