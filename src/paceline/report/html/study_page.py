"""Page of studies: verdicts on the papers' claims, and figures of the rows behind them."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from paceline.report.html.page import Claim, Claims, Fact, Page, Section, Source
from paceline.report.html.study_figures import study_blocks
from paceline.studies.verdicts import DECIDED, FAILS, HOLDS, SMALL, UNDECIDED, UNMEASURED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.core.bootstrap import Interval
    from paceline.report.html.page import Tone
    from paceline.studies.rows import StudyRow
    from paceline.studies.verdicts import Finding

_TONES: dict[str, Tone] = {HOLDS: "good", FAILS: "bad"}
_ORDER = (HOLDS, FAILS, SMALL, UNDECIDED, UNMEASURED)
_TERMS = ("verdict", "claim's interval", "block efficiency", "expected acceptance", "gamma")
_FIGURE_TERMS = (
    "block efficiency",
    "expected acceptance",
    "rejection rate",
    "relative quality",
    "family",
    "95% interval",
    "dominance",
    "regret",
)


def study_page(title: str, rows: Sequence[StudyRow], findings: Sequence[Finding]) -> Page:
    """The page of one study or of all: the verdicts first, then a section for each study.

    Raises:
        UsageError: rows of one figure measure different examples.
    """
    papers = dict.fromkeys(one.claim.paper for one in findings)
    sections = [
        Section(f"Claims of {paper}", [_claims(paper, findings)], _TERMS) for paper in papers
    ]
    for name in dict.fromkeys(row.study for row in rows):
        own = [row for row in rows if row.study == name]
        blocks = study_blocks(own, [one for one in findings if one.claim.study == name])
        if blocks:
            covers = dict.fromkeys(item for row in own for item in row.covers)
            heading = f"{name.replace('_', ' ').capitalize()}: {', '.join(covers)}"
            sections.append(Section(heading, blocks, _FIGURE_TERMS))
    return Page(
        title=title,
        verdict=_verdict(findings),
        facts=_facts(rows, findings),
        sections=sections,
        about=_about(rows),
    )


def _verdict(findings: Sequence[Finding]) -> str:
    if not findings:
        return "These rows belong to no claim; the figures show what was measured."
    counts = Counter(one.verdict for one in findings)
    tested = [verdict for verdict in _ORDER if verdict != UNMEASURED and counts[verdict]]
    if not tested:
        return f"None of {len(findings)} claims was tested: their studies have not run."
    parts = [f"{counts[verdict]} {_WORDS[verdict]}" for verdict in tested]
    listed = ", ".join(parts[:-1]) + (" and " if len(parts) > 1 else "") + parts[-1]
    number = (
        f"{len(findings) - counts[UNMEASURED]} of {len(findings)} claims were tested: {listed}."
    )
    ratios = [
        (one.effect, one.claim.here)
        for one in findings
        if one.verdict == HOLDS and one.effect is not None and _is_ratio(one)
    ]
    if not ratios:
        return number
    effect, here = max(ratios, key=lambda one: one[0].low)
    return (
        f"{number} The clearest effect is {effect.value:+.0%} ({effect.low:+.0%} to "
        f"{effect.high:+.0%}): {here}"
    )


_WORDS = {
    HOLDS: "hold",
    FAILS: "do not hold here",
    SMALL: "have an effect too small to matter here",
    UNDECIDED: "are undecided",
}


def _facts(rows: Sequence[StudyRow], findings: Sequence[Finding]) -> list[Fact]:
    decided = sum(one.verdict in DECIDED for one in findings)
    units = len({(row.population, unit) for row in rows for unit in row.units})
    return [
        Fact("claims decided", f"{decided} of {len(findings)}"),
        Fact("settings measured", f"{len(rows):,}"),
        Fact("examples", f"{units:,}"),
    ]


def _about(rows: Sequence[StudyRow]) -> list[str]:
    """Machines, versions and commits of the rows; several if stages ran at different times."""
    machines = dict.fromkeys(row.source.machine for row in rows)
    commits = dict.fromkeys(
        f"{row.source.commit[:12]}{' with changes' if row.source.modified else ''}"
        for row in rows
        if row.source.commit
    )
    versions = dict.fromkeys(
        ", ".join(f"{name} {value}" for name, value in row.source.versions.items()) for row in rows
    )
    lines = [f"Machine: {machine}" for machine in machines]
    lines += [f"Versions: {text}" for text in versions]
    if commits:
        lines.append(f"Commit of Paceline: {', '.join(commits)}")
    lines.append(
        "Run it again: make garden, then make study; docs/guides/studies.md says how to "
        "use your own models."
    )
    return lines


def _claims(paper: str, findings: Sequence[Finding]) -> Claims:
    """The tested claims of a paper, first those that hold; the others are counted by study."""
    every = [one for one in findings if one.claim.paper == paper]
    own = sorted(
        (one for one in every if one.verdict != UNMEASURED),
        key=lambda one: _ORDER.index(one.verdict),
    )
    left = Counter(one.claim.study for one in every if one.verdict == UNMEASURED)
    untested = ""
    if left:
        studies = ", ".join(f"{count} by the study {name}" for name, count in left.items())
        untested = f" Not tested yet: {studies}."
    return Claims(
        title=f"Claims of {paper}",
        claims=[_claim(one) for one in own],
        source=Source("paceline claims"),
        text=(
            "Each claim is a statement on result rows. The interval is the claim's own: any wrong "
            f"verdict of a paper has a probability of at most 5%.{untested}"
        ),
        source_heading="what the paper says",
        effect_heading="effect",
    )


def _claim(one: Finding) -> Claim:
    return Claim(
        claim=one.claim.here,
        source=f"{one.claim.item}: {one.claim.says}",
        effect=one.effect,
        effect_name=_effect_name(one),
        count=one.num_units or None,
        verdict=one.verdict,
        tone=_TONES.get(one.verdict, "neutral"),
        command=f"paceline study run {one.claim.study}",
        reason=one.reason,
        effect_text=_percent(one.effect) if one.effect is not None and _is_ratio(one) else "",
    )


def _percent(effect: Interval) -> str:
    return f"{effect.value:+.1%} ({effect.low:+.1%} to {effect.high:+.1%})"


def _effect_name(one: Finding) -> str:
    test = one.claim.test
    is_ratio = _is_ratio(one)
    matters = f"smallest that matters {f'{test.matters:.0%}' if is_ratio else f'{test.matters:g}'}"
    match test.kind:
        case "paired":
            words = "first / second - 1" if test.compare == "ratio" else "first - second"
            return f"{words}; {matters}"
        case "frontier":
            return f"{test.statistic.replace('_', ' ')}, first - second; {matters}"
        case "dominance":
            return f"largest gap of the distribution functions; {matters}"


def _is_ratio(one: Finding) -> bool:
    return one.claim.test.kind == "paired" and one.claim.test.compare == "ratio"
