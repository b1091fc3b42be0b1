"""A row per sentence and a column per task and temperature; verdicts are those of the file."""

import re
from typing import Any

import pytest

from paceline.config import validate
from paceline.results.row import Row
from paceline.studies.claim_file import ClaimFile
from paceline.studies.verdicts import (
    CONFIRMED,
    FAILS,
    HOLDS,
    UNMEASURED,
    VACUOUS,
    Finding,
    judge,
)
from paceline.view.page import Mark, Source, Table
from paceline.view.summary import summary
from support.results import claim, study_row

UNITS = 12
SOURCE = Source("paceline claims")
SAYS = "what the paper says, and what was tested"


def drafts(task: str, temperature: float, tau: float, **setting: Any) -> Row:
    blocks = [20 / (tau + 0.02 * (unit % 3)) for unit in range(UNITS)]
    sums = {"emitted": [20.0] * UNITS, "calls": blocks}
    population = f"prompts of {task}"
    return study_row(sums, population=population, task=task, temperature=temperature, **setting)


def rows() -> list[Row]:
    return [
        drafts(task, temperature, tau, label=label)
        for task in ("code", "docs")
        for temperature in (0.0, 1.0)
        for label, tau in (("start", 1.5), ("end", 1.4 if task == "docs" else 2.0))
    ]


def gain(tasks: list[str], **changes: Any) -> dict[str, Any]:
    """The claim that the last draft is better than the first, at both temperatures."""
    test = {
        "kind": "paired",
        "rows": {"task": "$task", "temperature": "$t"},
        "over": "emitted",
        "under": "calls",
        "first": {"where": {"label": "end"}},
        "second": {"where": {"label": "start"}},
        "matters": 0.02,
    }
    values = {
        "id": "more-$task-$temperature",
        "says": "It helps.",
        "here": "More on $task at T=$t, gamma 5.",
        "size": {"text": "20%", "low": 0.2, "high": 0.2},
        "over": {
            "task": tasks,
            "temperature": {"T=0": {"as": "greedy", "t": 0}, "T=1": {"as": "t1", "t": 1}},
        },
    }
    return claim(test) | values | changes


def columns_of(table: Table) -> list[str]:
    """The columns of tasks and temperatures."""
    return list(table.rows[0])[1:]


def marks_of(row: dict[str, Any]) -> dict[str, Mark]:
    return {name: cell for name, cell in row.items() if name != SAYS and cell}


def judged(claims: list[dict[str, Any]], found: list[Row]) -> list[Finding]:
    return judge(validate(ClaimFile, {"claims": claims}), found)


def test_a_sentence_is_one_row_with_a_column_per_task_and_temperature():
    findings = judged([gain(["docs", "code"])], rows())
    table = summary("DistillSpec", findings, SOURCE)
    assert table is not None
    assert columns_of(table) == ["code, T=0", "code, T=1", "docs, T=0", "docs, T=1"]
    (row,) = table.rows
    assert row[SAYS].detail == "Table C.1; size: 20%. Tested: More on … at T=…, gamma 5."
    assert {name: mark.word for name, mark in marks_of(row).items()} == {
        "code, T=0": HOLDS,
        "code, T=1": HOLDS,
        "docs, T=0": FAILS,
        "docs, T=1": FAILS,
    }
    assert row["code, T=1"].detail.startswith("+33% (+")
    assert row["code, T=1"].detail.endswith("; the paper's size is smaller than the interval")
    figures = r"-6\.6% \(-\d+% to -\d+%\): (\d\.\d+) → (\d\.\d+); the paper's size is larger.*"
    shown = re.fullmatch(figures, row["docs, T=1"].detail)
    assert shown is not None
    assert float(shown[2]) / float(shown[1]) - 1 == pytest.approx(-0.066, abs=0.005)
    assert str(table.rows[0]["docs, T=0"]).startswith("does not hold -6.6% (")


def test_other_places_are_rows_of_their_own_and_claims_without_places_have_a_column():
    over = {"draft": ["a", "b"]}
    test = gain([])["test"] | {"rows": {"task": "code", "temperature": 1.0}}
    findings = judged([claim(test, id="of-$draft", here="$draft helps.", over=over)], rows())
    table = summary("DistillSpec", findings, SOURCE)
    assert table is not None
    assert columns_of(table) == ["all together"]
    tested = [row[SAYS].detail.partition("Tested: ")[2] for row in table.rows]
    assert tested == ["a: … helps.", "b: … helps."]


def test_untested_claims_and_other_papers_are_left_out():
    findings = judged([gain(["code", "poems"])], rows())
    assert findings[2].verdict == UNMEASURED
    table = summary("DistillSpec", findings, SOURCE)
    assert table is not None
    assert columns_of(table) == ["code, T=0", "code, T=1"]
    assert summary("Faster Cascades", findings, SOURCE) is None


@pytest.mark.parametrize(("level", "verdict"), [(0.3, CONFIRMED), (-3.0, VACUOUS)])
def test_the_verdict_on_a_bound_is_that_of_the_file(level: float, verdict: str):
    sums = {"acceptance": [0.6] * UNITS, "proven": [level] * UNITS}
    test = {"first": {"over": "acceptance"}, "second": {"over": "proven"}, "empty": 0.0}
    findings = judged([claim({"kind": "pointwise"} | test)], [study_row(sums)])
    table = summary("DistillSpec", findings, SOURCE)
    assert table is not None
    mark = table.rows[0]["all together"]
    assert (mark.word, mark.detail == "the bound is -3.00") == (verdict, verdict == VACUOUS)
