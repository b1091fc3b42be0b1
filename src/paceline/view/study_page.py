"""Page of studies: what was tested, verdicts on the papers' claims, and figures behind them."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import TYPE_CHECKING

from paceline.results.built_in import PAPERS
from paceline.studies import verdicts
from paceline.studies.claim_file import Paired
from paceline.train.sweep import SEEDS
from paceline.view.page import (
    Fact,
    Figure,
    Mark,
    Page,
    Section,
    Source,
    Table,
    bounded,
    grouped,
    interval_text,
)
from paceline.view.study_background import (
    NO_BACKGROUND,
    commands,
    setup,
    terms_of_findings,
    terms_of_rows,
)
from paceline.view.study_figures import study_blocks

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline.results.row import Row
    from paceline.studies.claim_file import Claim
    from paceline.studies.verdicts import Finding
    from paceline.view.page import Block, Line, Tone
    from paceline.view.study_background import Background

_TERMS = ("verdict", "block efficiency", "gamma", "expected acceptance")
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
_WORDS = {  # of one claim, and of several
    verdicts.HOLDS: ("holds", "hold"),
    verdicts.HOLDS_SMALL: ("holds with a small effect", "hold with a small effect"),
    verdicts.FAILS: ("does not hold here", "do not hold here"),
    verdicts.SMALL: ("has an effect too small to matter", "have an effect too small to matter"),
    verdicts.UNDECIDED: ("is undecided", "are undecided"),
}


def study_page(
    title: str,
    rows: Sequence[Row],
    findings: Sequence[Finding],
    background: Background = NO_BACKGROUND,
) -> Page:
    """The page of one study or of all: setup and verdicts first, then each study's figures.

    Args:
        title: Of the page.
        rows: Rows of the studies.
        findings: Verdicts on claims.
        background: Study files and configurations of the rows.

    Raises:
        UsageError: rows of one figure measure different examples.
    """
    order = dict.fromkeys(one.claim.study for one in findings)  # as in the file of claims
    by_study = grouped(rows, lambda row: row.study)
    studies = [name for name in order if name in by_study]
    by_study = {name: by_study[name] for name in dict.fromkeys([*studies, *by_study])}
    texts = [setup(name, own, background) for name, own in by_study.items()]
    sections = [Section("What was tested, and with what?", texts), *_summaries(findings)]
    files = background.studies
    if known := [commands(name, files[name]) for name in by_study if name in files]:
        sections.append(Section("How do I run it on my own models?", known))
    sections += _claim_sections(findings)
    sections += _figure_sections(by_study, findings, background)
    return Page(
        title=title,
        verdict=_verdict(findings),
        facts=_facts(rows, findings),
        sections=sections,
        about=["Verdicts are about the models and texts below."] if findings else [],
    )


def _verdict(findings: Sequence[Finding]) -> str:
    if not findings:
        return "These rows belong to no claim; the figures show what was measured."
    found = [one for one in findings if not one.claim.is_check]
    checks = Counter(one.verdict for one in findings if one.claim.is_check)
    counts = Counter(one.verdict for one in found)
    parts = [
        f"{counts[verdict]} {_WORDS[verdict][counts[verdict] > 1]}"
        for verdict in verdicts.VERDICTS
        if verdict != verdicts.UNMEASURED and counts[verdict]
    ]
    sentences: list[str] = []
    if parts:
        number = len(found) - counts[verdicts.UNMEASURED]
        sentences.append(f"{number} of {len(found)} claims were tested: {_listed(parts)}.")
    elif found:
        sentences.append(f"None of {len(found)} claims was tested: their studies have not run.")
    names = (*verdicts.CHECKS, verdicts.UNMEASURED)
    if named := [f"{checks[name]} {name}" for name in names if checks[name]]:
        sentences.append(f"Theorems, identities and algebra: {_listed(named)}.")
    ratios = [
        (one.effect, one.claim.here)
        for one in found
        if one.verdict == verdicts.HOLDS and one.effect is not None and _is_ratio(one)
    ]
    if ratios:
        effect, here = max(ratios, key=lambda one: one[0].low)
        sentences.append(f"The clearest effect is {interval_text(effect, '+.0%')}: {here}")
    return " ".join(sentences)


def _listed(parts: Sequence[str]) -> str:
    return ", ".join(parts[:-1]) + (" and " if len(parts) > 1 else "") + parts[-1]


def _facts(rows: Sequence[Row], findings: Sequence[Finding]) -> list[Fact]:
    found = [one for one in findings if not one.claim.is_check]
    decided = sum(one.verdict in verdicts.DECIDED for one in found)
    examples = {
        (row.population, unit) for row in rows if row.population != SEEDS for unit in row.units
    }
    return [
        Fact("claims decided", f"{decided} of {len(found)}"),
        Fact("settings measured", f"{len(rows):,}"),
        Fact("examples", f"{len(examples):,}"),
    ]


def _summaries(findings: Sequence[Finding]) -> list[Section]:
    """The findings of all papers in one section."""
    papers = grouped(findings, lambda one: one.claim.paper)
    known = [paper for paper in papers if _tested(findings, paper)]
    if not known:
        return []
    tables = [summary(paper, findings, _claim_source(findings)) for paper in known]
    untested = [one for one in findings if one.verdict == verdicts.UNMEASURED]
    found = [one for one in findings if one.verdict != verdicts.UNMEASURED]
    counts = Counter(one.claim.study for one in untested).items()
    studies = ", ".join(f"{name} ({count})" for name, count in counts)
    note = f"Claims that are not tested yet, by study: {studies}." if untested else ""
    terms = (*known, *_TERMS, *terms_of_findings(found))
    return [Section("Are the papers' claims true here?", list(filter(None, tables)), terms, note)]


def _claim_sections(findings: Sequence[Finding]) -> list[Section]:
    papers = dict.fromkeys(one.claim.paper for one in findings)
    return [
        Section(
            f"What was measured for each claim of {paper}?",
            [_claims(paper, findings)],
            ("claim's interval",),
            f"{PAPERS[paper].authors}: {PAPERS[paper].title}.",
        )
        for paper in papers
        if _tested(findings, paper)
    ]


def _figure_sections(
    by_study: Mapping[str, Sequence[Row]],
    findings: Sequence[Finding],
    background: Background,
) -> list[Section]:
    """A section per study and question; the study is named where several ask the same."""
    found = [
        (name, question, blocks)
        for name, rows in by_study.items()
        for question, blocks in study_blocks(
            rows, [one for one in findings if one.claim.study == name]
        ).items()
    ]
    count = Counter(question for _, question, _ in found)
    sections: list[Section] = []
    for name, question, blocks in found:
        study = background.studies.get(name)
        words = f" ({name.replace('_', ' ')})" if count[question] > 1 else ""
        sections.append(
            Section(
                f"{question.text}{words}",
                [_configured(block, background) for block in blocks],
                (*question.terms, *terms_of_rows(by_study[name])),
                f"Study {name}" + ("." if study is None else f": {study.title}."),
            )
        )
    return sections


def _configured(block: Block, background: Background) -> Block:
    """The block with the configuration of the command that made its rows, if it is known."""
    if not isinstance(block, Figure | Table) or block.source is None:
        return block
    known = background.stages.get(block.source.command)
    if known is None:
        return block
    source = dataclasses.replace(block.source, config=known.config, note=known.note)
    return dataclasses.replace(block, source=source)


def _is_ratio(finding: Finding) -> bool:
    """Whether the effect is first / second - 1."""
    test = finding.claim.test
    return isinstance(test, Paired) and test.compare == "ratio"


def _tested(findings: Sequence[Finding], paper: str) -> list[Finding]:
    """The findings on claims of a paper that were tested."""
    own = [one for one in findings if one.claim.paper == paper]
    return [one for one in own if one.verdict != verdicts.UNMEASURED]


def _claim_source(findings: Sequence[Finding]) -> Source:
    """The claims with their tests, as a file of claims."""
    claims = [one.claim.model_dump(mode="json", exclude_unset=True) for one in findings]
    note = "Each claim with its test, in the form of docs/claims.yaml."
    return Source("paceline claims --file claims.yaml", {"claims": claims}, note=note)


def summary(paper: str, findings: Sequence[Finding], source: Source) -> Table | None:
    """The tested claims of a paper; None if none was tested."""
    own = _tested(findings, paper)
    if not own:
        return None
    names = dict.fromkeys(_column(one.claim) for one in own)
    columns = sorted(names, key=lambda name: (name == _TOGETHER, name))
    lines: list[Line] = []
    for (_, place), group in grouped(own, _line_of).items():
        claim = group[0].claim
        text = claim.pattern or claim.here
        detail = f"{claim.item}; size: {claim.size.text}. Tested: {place}{text}"
        marks = {_column(one.claim): _mark(one) for one in group}
        row: Line = {_SAYS: Mark(claim.says, detail=detail)}
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
    form = "+.0%" if _is_ratio(finding) else "+.2f"
    more = "+.1%" if _is_ratio(finding) and abs(effect.value) < _SHORT else form
    text = f"{effect.value:{more}} ({effect.low:{form}} to {effect.high:{form}})"
    if isinstance(test, Paired) and finding.first is not None and finding.second is not None:
        text += f": {finding.second:.3g} → {finding.first:.3g}"
    return text


def _claims(paper: str, findings: Sequence[Finding]) -> Table:
    """The tested claims of a paper by sentence."""
    return Table(
        title=f"Claims of {paper}",
        rows=[_claim(one) for one in _tested(findings, paper)],
        source=_claim_source(findings),
        text=(
            "Each claim is a statement on result rows. The interval is the claim's own: any "
            "verdict of a paper is wrong with at most 5% probability. Intervals of claims on "
            "recipes are for other runs of training, too; others are about the models here."
        ),
        is_stacked=True,
    )


def _claim(one: Finding) -> Line:
    claim = one.claim
    size = f" Size in the paper: {claim.size.text}" + (f" ({one.size})." if one.size else ".")
    percent = interval_text(one.effect, "+.1%") if one.effect and _is_ratio(one) else ""
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
    least = f"{test.matters:.0%}" if _is_ratio(one) else f"{test.matters:g}"
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
