"""Findings in short: a row per sentence of a paper, a column per task and temperature."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.studies.claim_file import Paired
from paceline.studies.verdicts import (
    ALGEBRA,
    CONFIRMED,
    FAILS,
    HOLDS,
    HOLDS_SMALL,
    SMALL,
    UNDECIDED,
    UNMEASURED,
    VACUOUS,
    VIOLATED,
)
from paceline.view.page import Mark, Source, Table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.core.bootstrap import Interval
    from paceline.studies.claim_file import Claim
    from paceline.studies.verdicts import Finding
    from paceline.view.page import Row, Tone

_SIGNS = {
    HOLDS: "✓",
    HOLDS_SMALL: "✓",
    CONFIRMED: "✓",
    VACUOUS: "○",
    FAILS: "✗",
    VIOLATED: "✗",
    SMALL: "≈",
    ALGEBRA: "=",
    UNDECIDED: "?",
    UNMEASURED: "-",
}
_TONES: dict[str, Tone] = {HOLDS: "good", CONFIRMED: "good", FAILS: "bad", VIOLATED: "bad"}
_COLUMNS = ("task", "temperature")  # places that are columns; others are rows
_TOGETHER = "all together"
_SAYS = "what the paper says, and what was tested"


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


def summary(paper: str, findings: Sequence[Finding], source: Source) -> Table | None:
    """The tested claims of a paper; None if none was tested."""
    own = [one for one in findings if one.claim.paper == paper and one.verdict != UNMEASURED]
    if not own:
        return None
    groups: dict[tuple[str, str], list[Finding]] = {}
    for one in own:
        groups.setdefault((one.claim.sentence or one.claim.id, _rest(one.claim)), []).append(one)
    names = dict.fromkeys(_column(one.claim) for one in own)
    columns = sorted(names, key=lambda name: (name == _TOGETHER, name))
    lines: list[Row] = []
    for (_, place), group in groups.items():
        claim = group[0].claim
        tested = f"{place}: {_tested(claim)}" if place else _tested(claim)
        detail = f"{claim.item}; size: {claim.size.text}. Tested: {tested}"
        marks = {_column(one.claim): _mark(one) for one in group}
        row: Row = {_SAYS: Mark(claim.says, detail=detail)}
        lines.append(row | {name: marks.get(name, "") for name in columns})
    return Table(
        title=f"Findings of {paper}",
        text=(
            "A row per sentence of the paper, a column per task and temperature T. The numbers are "
            "the effect with its interval, and the figures that are compared. Three dots stand for "
            "what the column or the place says."
        ),
        rows=lines,
        source=source,
        is_stacked=True,
    )


def _tested(claim: Claim) -> str:
    return claim.pattern or claim.here


def _column(claim: Claim) -> str:
    names = [claim.place[key] for key in _COLUMNS if key in claim.place]
    return ", ".join(names) or _TOGETHER


def _rest(claim: Claim) -> str:
    return ", ".join(name for key, name in claim.place.items() if key not in _COLUMNS)


def _mark(finding: Finding) -> Mark:
    detail = _numbers(finding)
    if finding.verdict == VACUOUS:
        detail = f"the bound is {finding.second:.2f}"
    if finding.size:
        detail += f"; the paper's size is {finding.size}"
    return Mark(finding.verdict, tone_of(finding.verdict), _SIGNS[finding.verdict], detail)


def _numbers(finding: Finding) -> str:
    """The effect with its interval, and from where to where a paired figure changes."""
    effect, test = finding.effect, finding.claim.test
    if effect is None:
        return finding.reason
    interval = f"{effect.low:+.0%} to {effect.high:+.0%}"
    if not is_ratio(finding):
        interval = f"{effect.low:+.2f} to {effect.high:+.2f}"
    text = f"{effect_text(finding)} ({interval})"
    if isinstance(test, Paired) and finding.first is not None and finding.second is not None:
        text += f": {finding.second:.3g} → {finding.first:.3g}"
    return text
