"""Findings in short: a row per statement, a column per task and temperature."""

from __future__ import annotations

import difflib
import json
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.studies.claim_file import Dominance, Paired
from paceline.studies.evidence import select
from paceline.studies.verdicts import FAILS, HOLDS, SMALL, UNDECIDED, UNMEASURED
from paceline.view.page import Mark, Source, Table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.core.bootstrap import Interval
    from paceline.studies.claim_file import Claim, Side
    from paceline.studies.rows import StudyRow
    from paceline.studies.verdicts import Finding
    from paceline.view.page import Row, Tone

VACUOUS = "holds, but says nothing here"
SHOWN = (HOLDS, VACUOUS, FAILS, SMALL, UNDECIDED, UNMEASURED)
"""Verdicts as shown on pages, in their order."""
_SIGNS = {HOLDS: "✓", VACUOUS: "○", FAILS: "✗", SMALL: "≈", UNDECIDED: "?"}
_TONES: dict[str, Tone] = {HOLDS: "good", FAILS: "bad"}
_WHERE = ("task", "temperature", "trained_on", "part")  # settings over which claims are repeated
_TOGETHER = "all together"
_SAYS = "what the paper says, and what was tested"


class _Cell(NamedTuple):
    """A column: a task and a temperature; None if the claim is over several."""

    task: str | None
    temperature: float | None

    @property
    def name(self) -> str:
        if self.task is None and self.temperature is None:
            return _TOGETHER
        task = self.task or "all tasks"
        return task if self.temperature is None else f"{task}, T={self.temperature:g}"


def shown_verdict(finding: Finding, findings: Sequence[Finding]) -> str:
    """The verdict; a bound that holds beyond what is trivially true says nothing.

    A bound is a sum that a claim compares with a constant, such as 0: there it begins to say
    something. Another claim may state that a figure is above this sum. It says nothing if the sum
    is not above the constant on its own examples.
    """
    test = finding.claim.test
    if finding.verdict != HOLDS or not isinstance(test, Paired) or test.second is None:
        return finding.verdict
    if test.second.over is None or finding.second is None:
        return HOLDS
    for other in findings:
        trivial = other.claim.test
        if other.claim.study != finding.claim.study or not isinstance(trivial, Paired):
            continue
        if trivial.than is not None and _sums(trivial, trivial.first) == _sums(test, test.second):
            return VACUOUS if finding.second <= trivial.than else HOLDS
    return HOLDS


def _sums(test: Paired, side: Side) -> tuple[object, ...]:
    """What makes the figure of a side."""
    return side.over or test.over, side.under or test.under, side.transform


def tone_of(verdict: str) -> Tone:
    """How a verdict is marked."""
    return _TONES.get(verdict, "neutral")


def effect_text(finding: Finding) -> str:
    """The effect in short: percent for ratios."""
    effect = finding.effect
    if effect is None:
        return ""
    if not is_ratio(finding):
        return f"{effect.value:+.2f}"
    return f"{effect.value:+.0%}" if abs(effect.value) >= 0.095 else f"{effect.value:+.1%}"


def is_ratio(finding: Finding) -> bool:
    """Whether the effect is first / second - 1."""
    test = finding.claim.test
    return isinstance(test, Paired) and test.compare == "ratio"


def interval_text(effect: Interval) -> str:
    """A ratio's effect in percent."""
    return f"{effect.value:+.1%} ({effect.low:+.1%} to {effect.high:+.1%})"


def summary(
    paper: str, findings: Sequence[Finding], rows: Sequence[StudyRow], source: Source
) -> Table | None:
    """The tested claims of a paper; None if none was tested."""
    own = [one for one in findings if one.claim.paper == paper and one.verdict != UNMEASURED]
    if not own:
        return None
    cells = {one.claim.id: _cell(one.claim, rows) for one in own}
    groups = _groups(own, cells)
    columns = sorted(dict.fromkeys(cells.values()), key=_order)
    lines: list[Row] = []
    for group in groups:
        tested = common([one.claim.here for one in group])
        row: Row = {
            _SAYS: Mark(group[0].claim.says, detail=f"{group[0].claim.item}. Tested: {tested}")
        }
        marks = {cells[one.claim.id].name: _mark(one, cells, findings) for one in group}
        lines.append(row | {cell.name: marks.get(cell.name, "") for cell in columns})
    return Table(
        title=f"Findings of {paper}",
        text=(
            "A row per statement, a column per task and temperature T. The numbers are the effect "
            "with its interval, and the figures that are compared. Intervals are over examples; "
            "seeds of training are averaged. Three dots stand for what the column says."
        ),
        rows=lines,
        source=source,
        is_stacked=True,
    )


def _mark(finding: Finding, cells: dict[str, _Cell], findings: Sequence[Finding]) -> Mark:
    verdict = shown_verdict(finding, findings)
    detail = _numbers(finding)
    if verdict == VACUOUS:
        detail = f"the bound is {finding.second:.2f}"
    test = finding.claim.test
    if isinstance(test, Paired | Dominance):
        trained_on = (test.rows | test.first.where).get("trained_on")
        if isinstance(trained_on, str) and trained_on != cells[finding.claim.id].task:
            detail += f", trained on {trained_on}"
    return Mark(verdict, tone_of(verdict), _SIGNS[verdict], detail)


def _numbers(finding: Finding) -> str:
    """The effect with its interval, and from where to where a paired figure changes."""
    effect, test = finding.effect, finding.claim.test
    if effect is None:
        return ""
    interval = f"{effect.low:+.0%} to {effect.high:+.0%}"
    if not is_ratio(finding):
        interval = f"{effect.low:+.2f} to {effect.high:+.2f}"
    text = f"{effect_text(finding)} ({interval})"
    if isinstance(test, Paired) and finding.first is not None and finding.second is not None:
        text += f": {finding.second:.3g} → {finding.first:.3g}"
    return text


def _order(cell: _Cell) -> tuple[bool, str, float]:
    temperature = -1.0 if cell.temperature is None else cell.temperature
    return cell.task is None, cell.task or "", temperature


def _groups(findings: Sequence[Finding], cells: dict[str, _Cell]) -> list[list[Finding]]:
    """Claims that differ in task and temperature only; each has a cell of its own."""
    found: dict[tuple[str, int], list[Finding]] = {}
    for one in findings:
        key, number = _kind(one.claim), 0
        cell = cells[one.claim.id]
        while any(cells[other.claim.id] == cell for other in found.get((key, number), ())):
            number += 1
        found.setdefault((key, number), []).append(one)
    return list(found.values())


def _kind(claim: Claim) -> str:
    """The statement and the test without the settings over which it is repeated."""
    return json.dumps([claim.says, claim.item, _stripped(claim.test.model_dump(mode="json"))])


def _stripped(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _stripped(part) for key, part in value.items() if key not in _WHERE}
    return value


def _cell(claim: Claim, rows: Sequence[StudyRow]) -> _Cell:
    """The task and the temperature of the rows that the claim's first side uses."""
    test = claim.test
    conditions = [test.rows]
    if isinstance(test, Paired | Dominance):
        conditions.append(test.first.where)
    own = select([row for row in rows if row.study == claim.study], *conditions)
    tasks = {row.setting["task"] for row in own if "task" in row.setting}
    temperatures = {row.setting["temperature"] for row in own if "temperature" in row.setting}
    return _Cell(
        str(tasks.pop()) if len(tasks) == 1 else None,
        float(temperatures.pop()) if len(temperatures) == 1 else None,
    )


def common(texts: Sequence[str]) -> str:
    """The words that all texts share; three dots where they differ."""
    words = texts[0].split()
    for text in texts[1:]:
        matcher = difflib.SequenceMatcher(a=words, b=text.split(), autojunk=False)
        merged: list[str] = []
        for kind, begin, end, _, _ in matcher.get_opcodes():
            merged += words[begin:end] if kind == "equal" else ["…"]
        words = merged
    return " ".join(
        word for place, word in enumerate(words) if word != "…" or words[:place][-1:] != ["…"]
    )
