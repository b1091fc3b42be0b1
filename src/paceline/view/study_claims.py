"""Tables of findings: a row per sentence of a paper, and a row per claim."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.studies import verdicts
from paceline.studies.claim_file import Paired
from paceline.view.page import Mark, Source, Table, bounded, grouped, interval_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.studies.claim_file import Claim
    from paceline.studies.verdicts import Finding
    from paceline.view.page import Row, Tone

_SIGNS: dict[str, tuple[str, Tone]] = {
    verdicts.HOLDS: ("✓", "good"),
    verdicts.HOLDS_SMALL: ("✓", "neutral"),
    verdicts.CONFIRMED: ("✓", "good"),
    verdicts.VACUOUS: ("○", "neutral"),
    verdicts.FAILS: ("✗", "bad"),
    verdicts.VIOLATED: ("✗", "bad"),
    verdicts.SMALL: ("≈", "neutral"),
    verdicts.ALGEBRA: ("=", "neutral"),
    verdicts.UNDECIDED: ("?", "neutral"),
    verdicts.UNMEASURED: ("-", "neutral"),
}
_STATISTICS = {
    "curve": "quality / target's at equal cost",
    "cost_at_quality": "saving at the quality",
    "quality_at_cost": "best quality / target's at the target's cost",
    "quality_at_low_cost": "best quality / target's at low cost",
    "width": "range of costs",
}
_COLUMNS = ("task", "temperature")  # places that are columns; others are rows
_TOGETHER = "all together"
_SHORT = 0.095  # effects from here on have no decimals of a percent
_SAYS = "what the paper says, and what was tested"


def is_ratio(finding: Finding) -> bool:
    """Whether the effect is first / second - 1."""
    test = finding.claim.test
    return isinstance(test, Paired) and test.compare == "ratio"


def tested(findings: Sequence[Finding], paper: str) -> list[Finding]:
    """The findings on claims of a paper that were tested."""
    own = [one for one in findings if one.claim.paper == paper]
    return [one for one in own if one.verdict != verdicts.UNMEASURED]


def claim_source(findings: Sequence[Finding]) -> Source:
    """The claims with their tests, as a file of claims."""
    claims = [one.claim.model_dump(mode="json", exclude_unset=True) for one in findings]
    note = "Each claim with its test, in the form of docs/claims.yaml."
    return Source("paceline claims --file claims.yaml", {"claims": claims}, note=note)


def summary(paper: str, findings: Sequence[Finding], source: Source) -> Table | None:
    """The tested claims of a paper; None if none was tested."""
    own = tested(findings, paper)
    if not own:
        return None
    names = dict.fromkeys(_column(one.claim) for one in own)
    columns = sorted(names, key=lambda name: (name == _TOGETHER, name))
    lines: list[Row] = []
    for (_, place), group in grouped(own, _line_of).items():
        claim = group[0].claim
        text = claim.pattern or claim.here
        detail = f"{claim.item}; size: {claim.size.text}. Tested: {place}{text}"
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


def _line_of(finding: Finding) -> tuple[str, str]:
    """The sentence of a claim, and its place besides the columns."""
    claim = finding.claim
    place = ", ".join(name for key, name in claim.place.items() if key not in _COLUMNS)
    return claim.sentence or claim.id, f"{place}: " if place else ""


def _column(claim: Claim) -> str:
    names = [claim.place[key] for key in _COLUMNS if key in claim.place]
    return ", ".join(names) or _TOGETHER


def _mark(finding: Finding) -> Mark:
    detail = _numbers(finding)
    if finding.verdict == verdicts.VACUOUS:
        detail = f"the bound is {finding.second:.2f}"
    if finding.size:
        detail += f"; the paper's size is {finding.size}"
    sign, tone = _SIGNS[finding.verdict]
    return Mark(finding.verdict, tone, sign, detail)


def _numbers(finding: Finding) -> str:
    """The effect with its interval, and from where to where a paired figure changes."""
    effect, test = finding.effect, finding.claim.test
    if effect is None:
        return finding.reason
    form = "+.0%" if is_ratio(finding) else "+.2f"
    more = "+.1%" if is_ratio(finding) and abs(effect.value) < _SHORT else form
    text = f"{effect.value:{more}} ({effect.low:{form}} to {effect.high:{form}})"
    if isinstance(test, Paired) and finding.first is not None and finding.second is not None:
        text += f": {finding.second:.3g} → {finding.first:.3g}"
    return text


def claims_of(paper: str, findings: Sequence[Finding]) -> Table:
    """The tested claims of a paper by sentence."""
    return Table(
        title=f"Claims of {paper}",
        rows=[_claim(one) for one in tested(findings, paper)],
        source=claim_source(findings),
        text=(
            "Each claim is a statement on result rows. The interval is the claim's own: any "
            "verdict of a paper is wrong with at most 5% probability. Intervals of claims on "
            "recipes are for other runs of training, too; others are about the models here."
        ),
        is_stacked=True,
    )


def _claim(one: Finding) -> Row:
    claim = one.claim
    size = f" Size in the paper: {claim.size.text}" + (f" ({one.size})." if one.size else ".")
    percent = interval_text(one.effect, "+.1%") if one.effect and is_ratio(one) else ""
    reason = ". ".join(filter(None, (one.reason, one.note, claim.remark, one.margins)))
    return {
        "claim": claim.here,
        "what the paper says": f"{claim.item}: {claim.says}{size}",
        **bounded("effect", one.effect),
        "effect is": f"{percent} {_effect_name(one)}".strip(),
        "n": one.num_units or None,
        "verdict": Mark(one.verdict, _SIGNS[one.verdict][1], detail=reason),
        "command": f"paceline study run {claim.study}",
    }


def _effect_name(one: Finding) -> str:
    test = one.claim.test
    if test.kind == "pointwise":
        return "violations"
    least = f"{test.matters:.0%}" if is_ratio(one) else f"{test.matters:g}"
    matters = f"smallest that matters {least}"
    match test.kind:
        case "paired":
            words = "first / second - 1" if test.compare == "ratio" else "first - second"
            return f"{words}; {matters}"
        case "frontier":
            return f"{_STATISTICS[test.statistic]}, first - second; {matters}"
        case "dominance":
            return f"largest gap of the distribution functions; {matters}"
        case "correlation":
            words = "rank correlation" if test.ranks else "correlation"
            return f"{words} - {test.than:g}; {matters}"
