"""Tables of result rows: settings and figures that are named, for pages and the terminal."""

from io import StringIO

import numpy as np
import pytest
from rich.console import Console

from paceline.cli.tables import printed
from paceline.results import FIGURES, Row
from paceline.view.page import Table, table_of
from support.results import result_row

COUNT = 12
DRAWN = np.random.default_rng(1)


def row(gamma: int, **totals: float) -> Row:
    emitted, calls = (DRAWN.uniform(*ends, COUNT).tolist() for ends in ((5, 9), (2, 4)))
    made = result_row({"emitted": emitted, "calls": calls}, draft="small", gamma=gamma)
    return made.extended({}, {"parameter_ratio": 0.1, **totals})


def printed_lines(table: Table, width: int) -> list[str]:
    seen = StringIO()
    Console(file=seen, width=width).print(printed(table))
    assert "…" not in seen.getvalue()
    return [line.rstrip() for line in seen.getvalue().splitlines()]


def test_a_line_has_the_settings_and_figures_that_are_named_with_their_intervals():
    rows = [row(1), row(2)]
    found = table_of(rows, ("draft", "gamma", "task"), ("block_efficiency", "quality"))
    for line, one in zip(found.rows, rows, strict=True):
        value = sum(map(float, one.sums["emitted"])) / sum(map(float, one.sums["calls"]))  # pyright: ignore
        tau = FIGURES["block_efficiency"].measure(one)
        assert line == {"draft": "small", "gamma": one.setting["gamma"], "block_efficiency": tau}
        assert tau.value == pytest.approx(value)


def test_a_figure_that_some_rows_lack_is_unknown_there():
    found = table_of([row(1), row(2, accuracy=0.25)], ("gamma",), ("accuracy",))
    assert [line["accuracy"] for line in found.cells()] == ["-", "0.250"]


@pytest.mark.parametrize("width", [60, 80])
def test_the_terminal_prints_each_definition_of_the_registry_once(width: int):
    figures = ("block_efficiency", "mbsu", "cost_ratio")
    rows = [row(gamma, cost_ratio=0.2) for gamma in (1, 2)]
    found = table_of(
        rows,
        ("draft", "gamma"),
        figures,
        bare=("mbsu",),
        units="prompts",
    )
    lines = printed_lines(found, width)
    assert max(map(len, lines)) <= width
    text = " ".join(lines)
    for name in figures:
        assert text.count(f": {FIGURES[name].definition}") == 1
    assert "tokens per target call (tau): new tokens" in text
    assert lines[-1] == "brackets: 95% intervals over prompts"
    (line,) = (line for line in lines if line.startswith("small") and line.split()[1] == "2")
    assert line.split()[4] == f"{FIGURES['mbsu'].value(rows[1]):.3f}"


def test_seven_columns_of_numbers_fit_sixty_characters():
    figures = ("block_efficiency", "break_even_acceptance", "predicted_speedup", "mbsu")
    figures += ("needed_block_efficiency", "expected_speedup")
    totals = {"cost_ratio": 0.2, "break_even_acceptance": 0.4}
    rows = [row(12, block_cost=1.25, needed_block_efficiency=1.3, **totals)]
    lines = printed_lines(table_of(rows, ("gamma",), figures, bare=figures), 60)
    (numbers,) = (line.split() for line in lines if line.split()[:1] == ["12"])
    assert numbers[1:] == [f"{FIGURES[name].value(rows[0]):.3f}" for name in figures]


def test_a_column_that_is_no_figure_has_the_definition_and_format_of_the_table():
    columns, formats = {"pass": "seconds of a pass."}, {"pass": ".1f"}
    lines = printed_lines(Table("", [{"pass": 0.25}], columns=columns, formats=formats), 60)
    assert [line.split() for line in lines[:2]] == [["pass"], ["0.2"]]
    assert lines[2] == "pass: seconds of a pass"
