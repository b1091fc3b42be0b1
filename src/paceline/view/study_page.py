"""Page of studies: what was tested, verdicts on the papers' claims, and figures behind them."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import TYPE_CHECKING

from paceline.studies.verdicts import (
    CHECKS,
    DECIDED,
    FAILS,
    HOLDS,
    HOLDS_SMALL,
    SMALL,
    UNDECIDED,
    UNMEASURED,
    VERDICTS,
)
from paceline.train.sweep import SEEDS
from paceline.view.definitions import PAPERS
from paceline.view.page import Fact, Figure, Mark, Page, Section, Source, Table, bounded
from paceline.view.study_background import (
    NO_BACKGROUND,
    commands,
    setup,
    terms_of_findings,
    terms_of_rows,
)
from paceline.view.study_figures import study_blocks
from paceline.view.summary import interval_text, is_ratio, summary, tone_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.results.row import Row as ResultRow
    from paceline.studies.verdicts import Finding
    from paceline.view.page import Block, Row
    from paceline.view.study_background import Background
    from paceline.view.study_figures import Question

_TERMS = ("verdict", "block efficiency", "gamma", "expected acceptance")
_CLAIM_TERMS = ("claim's interval",)
_STATISTICS = {
    "curve": "quality / target's at equal cost",
    "cost_at_quality": "saving at the quality",
    "quality_at_cost": "best quality / target's at the target's cost",
    "quality_at_low_cost": "best quality / target's at low cost",
    "width": "range of costs",
}
_WORDS = {  # of one claim, and of several
    HOLDS: ("holds", "hold"),
    HOLDS_SMALL: ("holds with a small effect", "hold with a small effect"),
    FAILS: ("does not hold here", "do not hold here"),
    SMALL: ("has an effect too small to matter", "have an effect too small to matter"),
    UNDECIDED: ("is undecided", "are undecided"),
}


def study_page(
    title: str,
    rows: Sequence[ResultRow],
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
    measured = dict.fromkeys(row.study for row in rows)
    order = [one.claim.study for one in findings]  # as in the file of claims

    def place(name: str) -> int:
        return order.index(name) if name in order else len(order)

    studies = sorted(measured, key=place)
    sections = [
        Section(
            "What was tested, and with what?",
            [
                setup(name, [row for row in rows if row.study == name], background)
                for name in studies
            ],
        ),
        *_summaries(findings),
    ]
    files = background.studies
    known = [commands(name, files[name]) for name in studies if name in files]
    if known:
        sections.append(Section("How do I run it on my own models?", known))
    sections += _claim_sections(findings)
    sections += _figure_sections(studies, rows, findings, background)
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
    tested = [verdict for verdict in VERDICTS if verdict != UNMEASURED and counts[verdict]]
    parts = [f"{counts[verdict]} {_WORDS[verdict][counts[verdict] > 1]}" for verdict in tested]
    if parts:
        number = (
            f"{len(found) - counts[UNMEASURED]} of {len(found)} claims were tested: "
            f"{_listed(parts)}."
        )
    elif found:
        number = f"None of {len(found)} claims was tested: their studies have not run."
    else:
        number = ""
    named = [f"{checks[name]} {name}" for name in (*CHECKS, UNMEASURED) if checks[name]]
    if named:
        number = f"{number} Theorems, identities and algebra: {_listed(named)}.".lstrip()
    ratios = [
        (one.effect, one.claim.here)
        for one in found
        if one.verdict == HOLDS and one.effect is not None and is_ratio(one)
    ]
    if not ratios:
        return number
    effect, here = max(ratios, key=lambda one: one[0].low)
    return (
        f"{number} The clearest effect is {effect.value:+.0%} ({effect.low:+.0%} to "
        f"{effect.high:+.0%}): {here}"
    )


def _listed(parts: Sequence[str]) -> str:
    return ", ".join(parts[:-1]) + (" and " if len(parts) > 1 else "") + parts[-1]


def _facts(rows: Sequence[ResultRow], findings: Sequence[Finding]) -> list[Fact]:
    found = [one for one in findings if not one.claim.is_check]
    decided = sum(one.verdict in DECIDED for one in found)
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
    papers = dict.fromkeys(one.claim.paper for one in findings)
    found = [(paper, summary(paper, findings, _claim_source(findings))) for paper in papers]
    tables = [(paper, table) for paper, table in found if table is not None]
    if not tables:
        return []
    tested = [one for one in findings if one.verdict != UNMEASURED]
    terms = (*(paper for paper, _ in tables), *_TERMS, *terms_of_findings(tested))
    untested = Counter(one.claim.study for one in findings if one.verdict == UNMEASURED)
    studies = ", ".join(f"{name} ({count})" for name, count in untested.items())
    note = f"Claims that are not tested yet, by study: {studies}." if untested else ""
    return [Section("Are the papers' claims true here?", [one for _, one in tables], terms, note)]


def _claim_source(findings: Sequence[Finding]) -> Source:
    """The claims with their tests, as a file of claims."""
    claims = [one.claim.model_dump(mode="json", exclude_unset=True) for one in findings]
    note = "Each claim with its test, in the form of docs/claims.yaml."
    return Source("paceline claims --file claims.yaml", {"claims": claims}, note=note)


def _claim_sections(findings: Sequence[Finding]) -> list[Section]:
    papers = dict.fromkeys(one.claim.paper for one in findings if one.verdict != UNMEASURED)
    return [
        Section(
            f"What was measured for each claim of {paper}?",
            [_claims(paper, findings)],
            _CLAIM_TERMS,
            f"{PAPERS[paper].authors}: {PAPERS[paper].title}.",
        )
        for paper in papers
    ]


def _claims(paper: str, findings: Sequence[Finding]) -> Table:
    """The tested claims of a paper by sentence."""
    own = [one for one in findings if one.claim.paper == paper and one.verdict != UNMEASURED]
    return Table(
        title=f"Claims of {paper}",
        rows=[_claim(one) for one in own],
        source=_claim_source(findings),
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
    percent = interval_text(one.effect) if one.effect and is_ratio(one) else ""
    reason = ". ".join(filter(None, (one.reason, one.note, claim.remark, one.margins)))
    return {
        "claim": claim.here,
        "what the paper says": f"{claim.item}: {claim.says}{size}",
        **bounded("effect", one.effect),
        "effect is": f"{percent} {_effect_name(one)}".strip(),
        "n": one.num_units or None,
        "verdict": Mark(one.verdict, tone_of(one.verdict), detail=reason),
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


def _figure_sections(
    studies: Sequence[str],
    rows: Sequence[ResultRow],
    findings: Sequence[Finding],
    background: Background,
) -> list[Section]:
    """A section per study and question; the study is named where several ask the same."""
    found: list[tuple[str, Question, list[Block]]] = []
    for name in studies:
        own = [row for row in rows if row.study == name]
        blocks = study_blocks(own, [one for one in findings if one.claim.study == name])
        found += [(name, question, each) for question, each in blocks.items()]
    count = Counter(question for _, question, _ in found)
    sections: list[Section] = []
    for name, question, blocks in found:
        own = [row for row in rows if row.study == name]
        study = background.studies.get(name)
        words = name.replace("_", " ")
        sections.append(
            Section(
                f"{question.text} ({words})" if count[question] > 1 else question.text,
                [_configured(block, background) for block in blocks],
                (*question.terms, *terms_of_rows(own)),
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
