"""A row per statement and a column per task and temperature; bounds that say nothing are marked."""

import re
from typing import Any

import pytest

from paceline.config import validate
from paceline.studies.claim_file import ClaimFile
from paceline.studies.rows import StudyRow
from paceline.studies.verdicts import FAILS, HOLDS, UNMEASURED, Finding, judge
from paceline.view.page import Mark, Source, Table
from paceline.view.summary import VACUOUS, common, shown_verdict, summary
from study_rows import claim, study_row

UNITS = 12
SOURCE = Source("paceline claims")
SAYS = "what the paper says, and what was tested"


def drafts(task: str, temperature: float, tau: float, **setting: Any) -> StudyRow:
    blocks = [20 / (tau + 0.02 * (unit % 3)) for unit in range(UNITS)]
    sums = {"emitted_5": [20.0] * UNITS, "blocks_5": blocks}
    population = f"prompts of {task}"
    return study_row(sums, population=population, task=task, temperature=temperature, **setting)


def rows() -> list[StudyRow]:
    return [
        drafts(task, temperature, tau, label=label)
        for task in ("code", "docs")
        for temperature in (0.0, 1.0)
        for label, tau in (("start", 1.5), ("end", 1.4 if task == "docs" else 2.0))
    ]


def gain(task: str | None, temperature: float | None, **changes: Any) -> dict[str, Any]:
    """The claim that the last draft is better than the first."""
    where = {"task": task, "temperature": temperature}
    test = {
        "kind": "paired",
        "rows": {name: value for name, value in where.items() if value is not None},
        "across": [name for name, value in where.items() if value is None],
        "over": "emitted_5",
        "under": "blocks_5",
        "first": {"where": {"label": "end"}},
        "second": {"where": {"label": "start"}},
        "matters": 0.02,
    }
    here = f"More on {task} at T={temperature}, gamma 5."
    values = {"id": f"more-{task}-{temperature}".lower().replace(".", "-"), "says": "It helps."}
    return claim(test, here=here) | values | changes


def columns_of(table: Table) -> list[str]:
    """The columns of tasks and temperatures."""
    return list(table.rows[0])[1:]


def marks_of(row: dict[str, Any]) -> dict[str, Mark]:
    return {name: cell for name, cell in row.items() if name != SAYS and cell}


def judged(claims: list[dict[str, Any]], found: list[StudyRow]) -> list[Finding]:
    return judge(validate(ClaimFile, {"claims": claims}), found, {"tiny": 1})


def test_a_statement_that_is_repeated_over_tasks_is_one_row():
    claims = [gain(task, t) for task in ("docs", "code") for t in (1.0, 0.0)]
    findings = judged([*claims, gain("code", None)], rows())
    table = summary("DistillSpec", findings, rows(), SOURCE)
    assert table is not None
    assert columns_of(table) == ["code", "code, T=0", "code, T=1", "docs, T=0", "docs, T=1"]
    each, averaged = table.rows
    assert each[SAYS].detail == "Table C.1. Tested: More on … at … gamma 5."
    assert {name: mark.word for name, mark in marks_of(each).items()} == {
        "code, T=0": HOLDS,
        "code, T=1": HOLDS,
        "docs, T=0": FAILS,
        "docs, T=1": FAILS,
    }
    assert each["code, T=1"].detail.startswith("+33% (+")
    figures = r"-6\.6% \(-\d+% to -\d+%\): (\d\.\d+) → (\d\.\d+)"
    shown = re.fullmatch(figures, each["docs, T=1"].detail)
    assert shown is not None
    assert float(shown[2]) / float(shown[1]) - 1 == pytest.approx(-0.066, abs=0.005)
    assert list(marks_of(averaged)) == ["code"]
    assert str(table.rows[0]["docs, T=0"]).startswith("does not hold -6.6% (")


def test_a_claim_over_all_tasks_has_a_column_of_its_own():
    findings = judged([gain(None, 1.0), gain(None, None)], rows())
    table = summary("DistillSpec", findings, rows(), SOURCE)
    assert table is not None
    assert columns_of(table) == ["all together", "all tasks, T=1"]


def test_two_claims_of_one_cell_are_two_rows():
    twice = [gain("code", 1.0), gain("code", 1.0, id="again")]
    table = summary("DistillSpec", judged(twice, rows()), rows(), SOURCE)
    assert table is not None
    assert [one[SAYS].word for one in table.rows] == ["It helps.", "It helps."]


def test_the_training_text_is_named_where_it_is_not_the_task():
    found = [row for row in rows() if row.setting["task"] == "docs"]
    trained = [
        row.model_copy(update={"setting": row.setting | {"trained_on": "code"}})
        if row.setting["label"] == "end"
        else row
        for row in found
    ]
    values = gain("docs", 1.0)
    values["test"]["first"]["where"]["trained_on"] = "code"
    table = summary("DistillSpec", judged([values], trained), trained, SOURCE)
    assert table is not None
    detail = table.rows[0]["docs, T=1"].detail
    assert detail.startswith("-6.6% (")
    assert detail.endswith(", trained on code")


def test_untested_claims_and_other_papers_are_left_out():
    findings = judged([gain("code", 1.0), gain("poems", 1.0)], rows())
    assert findings[1].verdict == UNMEASURED
    table = summary("DistillSpec", findings, rows(), SOURCE)
    assert table is not None
    assert columns_of(table) == ["code, T=1"]
    assert summary("Faster Cascades", findings, rows(), SOURCE) is None


def bounds(level: float) -> tuple[list[Finding], list[StudyRow]]:
    """Acceptance 0.6 above a bound; and the claim that the bound is above 0, on other rows."""
    spread = [0.01 * (unit % 3) for unit in range(UNITS)]
    long = {"acceptance": [0.6] * UNITS, "proven": [level + part for part in spread]}
    short = {"acceptance": [0.7] * UNITS, "proven": [0.3 + part for part in spread]}
    found = [study_row(sums, max_new_tokens=n) for sums, n in ((long, 16), (short, 2))]
    common = {"kind": "paired", "compare": "difference", "matters": 0.01}
    true = {"over": "acceptance", "rows": {"max_new_tokens": 16}, "first": {}}
    true |= {"second": {"over": "proven"}}
    useful = {"over": "proven", "rows": {"max_new_tokens": 2}, "first": {}, "than": 0.0}
    claims = [claim(common | true), claim(common | useful, id="two")]
    return judged(claims, found), found


@pytest.mark.parametrize(("level", "verdict"), [(-3.0, VACUOUS), (0.2, HOLDS)])
def test_a_bound_that_is_always_true_holds_but_says_nothing(level: float, verdict: str):
    findings, found = bounds(level)
    assert [one.verdict for one in findings] == [HOLDS, HOLDS]
    assert shown_verdict(findings[0], findings) == verdict
    assert shown_verdict(findings[1], findings) == HOLDS
    table = summary("DistillSpec", findings, found, SOURCE)
    assert table is not None
    mark = table.rows[0]["all together"]
    assert mark.word == verdict
    assert (mark.detail == "the bound is -2.99") == (verdict == VACUOUS)


def test_a_claim_on_another_figure_of_the_same_sum_does_not_judge_a_bound():
    """The sum per token is not the mean over examples."""
    findings, _ = bounds(-3.0)
    test = findings[1].claim.test.model_copy(update={"under": "acceptance"})
    other = findings[1]._replace(claim=findings[1].claim.model_copy(update={"test": test}))
    assert shown_verdict(findings[0], [findings[0], other]) == HOLDS


def test_a_bound_is_judged_by_its_own_study_alone():
    findings, _ = bounds(-3.0)
    elsewhere = findings[1]._replace(
        claim=findings[1].claim.model_copy(update={"study": "another"})
    )
    assert shown_verdict(findings[0], [findings[0], elsewhere]) == HOLDS


@pytest.mark.parametrize(
    ("texts", "shared"),
    [
        (["one two"], "one two"),
        (["on code, T=0, gamma 5", "on docs, T=1, gamma 5"], "on … gamma 5"),
        (["a b c", "a x c", "a b d"], "a …"),
        (["alone", "other"], "…"),
    ],
)
def test_the_words_that_texts_share_are_kept(texts: list[str], shared: str):
    assert common(texts) == shared
