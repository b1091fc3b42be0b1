"""Page of studies: what was tested, verdicts on the papers' claims, and figures behind them."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import TYPE_CHECKING

from paceline.studies import verdicts
from paceline.train.sweep import SEEDS
from paceline.view.definitions import PAPERS
from paceline.view.page import Fact, Figure, Page, Section, Table, grouped, interval_text
from paceline.view.study_background import (
    NO_BACKGROUND,
    commands,
    setup,
    terms_of_findings,
    terms_of_rows,
)
from paceline.view.study_claims import claim_source, claims_of, is_ratio, summary, tested
from paceline.view.study_figures import study_blocks

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline.results.row import Row as ResultRow
    from paceline.studies.verdicts import Finding
    from paceline.view.page import Block
    from paceline.view.study_background import Background

_TERMS = ("verdict", "block efficiency", "gamma", "expected acceptance")
_WORDS = {  # of one claim, and of several
    verdicts.HOLDS: ("holds", "hold"),
    verdicts.HOLDS_SMALL: ("holds with a small effect", "hold with a small effect"),
    verdicts.FAILS: ("does not hold here", "do not hold here"),
    verdicts.SMALL: ("has an effect too small to matter", "have an effect too small to matter"),
    verdicts.UNDECIDED: ("is undecided", "are undecided"),
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
        if one.verdict == verdicts.HOLDS and one.effect is not None and is_ratio(one)
    ]
    if ratios:
        effect, here = max(ratios, key=lambda one: one[0].low)
        sentences.append(f"The clearest effect is {interval_text(effect, '+.0%')}: {here}")
    return " ".join(sentences)


def _listed(parts: Sequence[str]) -> str:
    return ", ".join(parts[:-1]) + (" and " if len(parts) > 1 else "") + parts[-1]


def _facts(rows: Sequence[ResultRow], findings: Sequence[Finding]) -> list[Fact]:
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
    known = [paper for paper in papers if tested(findings, paper)]
    if not known:
        return []
    tables = [summary(paper, findings, claim_source(findings)) for paper in known]
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
            [claims_of(paper, findings)],
            ("claim's interval",),
            f"{PAPERS[paper].authors}: {PAPERS[paper].title}.",
        )
        for paper in papers
        if tested(findings, paper)
    ]


def _figure_sections(
    by_study: Mapping[str, Sequence[ResultRow]],
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
