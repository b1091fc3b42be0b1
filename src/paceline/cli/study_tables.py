"""Tables and JSON of `study` and `claims`."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rich.console import Group

from paceline.cli.console import echo
from paceline.cli.tables import grid, printed
from paceline.results.figures import FIGURES, figures_of
from paceline.view.page import Table, table_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table as Grid

    from paceline.results.row import Row
    from paceline.studies.run import StageState
    from paceline.studies.study_file import StudyConfig
    from paceline.studies.verdicts import Finding

_COLUMNS = {
    "effect": "of the first side over the second, as `compare` says; brackets: interval at the "
    "claim's own level, so that any wrong verdict of a paper has at most the probability of the "
    "claims file.",
    "paper": "whether the size that the paper reports is in the interval, larger or smaller; "
    "empty: it gives no such number.",
    "n": "examples, or positions of a check. --details says more.",
}
_SHORT = {"too small to matter": "too small", "known by algebra": "by algebra"}


def print_json(value: Any) -> None:
    """Print JSON to stdout."""
    echo(json.dumps(value, indent=2))


def study_list(studies: dict[str, StudyConfig]) -> Grid:
    """Name, title and items of the papers of each study."""
    rows = [
        {"study": name, "title": study.title, "covers": ", ".join(covered(study))}
        for name, study in studies.items()
    ]
    return grid(Table("", rows))


def covered(study: StudyConfig) -> list[str]:
    """Items of the papers, without repetition."""
    return list(dict.fromkeys(item for stage in study.stages.values() for item in stage.covers))


def stage_table(study: StudyConfig, found: Sequence[StageState]) -> Group:
    """The stages with expected minutes and disk; sums are of those that are not done."""
    numbers = {
        "minutes, 2 cores": "minutes_cpu",
        "minutes, GPU": "minutes_gpu",
        "disk, MB": "disk_mb",
    }
    rows: list[dict[str, Any]] = [
        {"stage": stage.name, "command": stage.command, "state": "done" if is_done else "to run"}
        | {words: float(getattr(stage, name)) for words, name in numbers.items()}
        for stage, is_done in found
    ]
    left = [row for row in rows if row["state"] == "to run"]
    sums = {words: math.fsum(row[words] for row in left) for words in numbers}
    sums["minutes, 2 cores"] /= study.workers  # stages run at the same time
    rows.append({"stage": "to run, in all", "command": "", "state": ""} | sums)
    return Group(
        study.title,
        grid(Table("", rows, formats=dict.fromkeys(numbers, "g"))),
        f"covers: {', '.join(covered(study))}",
    )


def states_as_json(found: Sequence[StageState]) -> list[dict[str, Any]]:
    """The stages of `stage_table`."""
    return [
        {
            "stage": stage.name,
            "command": stage.command,
            "done": is_done,
            "minutes_cpu": stage.minutes_cpu,
            "minutes_gpu": stage.minutes_gpu,
            "disk_mb": stage.disk_mb,
            "inputs": [str(path) for path in stage.inputs],
            "outputs": [str(path) for path in stage.outputs],
        }
        for stage, is_done in found
    ]


def claims_table(findings: Sequence[Finding]) -> Group:
    """The verdict on each claim with effect and n, by paper; theorems and identities last."""
    from paceline.studies.verdicts import UNMEASURED, VERDICTS

    found = [one for one in findings if not one.claim.is_check]
    checks = [one for one in findings if one.claim.is_check]
    papers = dict.fromkeys(one.claim.paper for one in found)
    parts = {paper: [one for one in found if one.claim.paper == paper] for paper in papers}
    if checks:
        parts["Theorems, identities and algebra"] = checks
    tables = [_verdict_table(title, own) for title, own in parts.items()]
    absent = [
        f"{one.claim.id}: {one.reason}"
        for one in found
        if one.verdict == UNMEASURED and one.command and not one.claim.awaits
    ]
    sentences = len({one.claim.sentence or one.claim.id for one in findings})
    lines = [f"{len(found)} claims: {_counts(found, VERDICTS)}"]
    if checks:
        lines.append(f"{len(checks)} checks: {_counts(checks)}")
    lines.append(f"These are {sentences} sentences of the papers.")
    return Group(printed(*tables), *lines, *absent)


def _counts(findings: Sequence[Finding], order: Sequence[str] = ()) -> str:
    counts = Counter(one.verdict for one in findings)
    names = [*order, *(name for name in counts if name not in order)]
    return ", ".join(f"{counts[name]} {name}" for name in names if counts[name])


def _verdict_table(title: str, findings: Sequence[Finding]) -> Table:
    rows = [
        {
            "claim": one.claim.id,
            "verdict": _SHORT.get(one.verdict, one.verdict),
            "effect": one.effect_text,
            "paper": one.size.partition(" ")[0],
            "n": str(one.num_units or ""),
        }
        for one in findings
    ]
    return Table(title, rows, columns=_COLUMNS)


def findings_as_json(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """All about each verdict."""
    return [
        {
            "id": one.claim.id,
            "sentence": one.claim.sentence or one.claim.id,
            "place": one.claim.place,
            "paper": one.claim.paper,
            "item": one.claim.item,
            "says": one.claim.says,
            "here": one.claim.here,
            "remark": one.claim.remark,
            "study": one.claim.study,
            "verdict": one.verdict,
            "is_check": one.claim.is_check,
            "reason": one.reason,
            "note": one.note,
            "papers_size": one.claim.size.model_dump(),
            "size": one.size,
            "fixed": one.claim.fixed,
            "known": one.claim.known,
            "earlier_margin": one.claim.earlier,
            "earlier_verdict": one.earlier or None,
            "effect": None if one.effect is None else [_finite(v) for v in one.effect],
            "first": None if one.first is None else _finite(one.first),
            "second": None if one.second is None else _finite(one.second),
            "matters": getattr(one.claim.test, "matters", None),
            "n": one.num_units,
            "command": one.command,
        }
        for one in findings
    ]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def bounds_table(rows: Sequence[Row]) -> Group:
    """Means over prompts of acceptance and its bounds; regret and its bound per position."""
    theorem, *lemmas = rows
    acceptance = [value for value in theorem.sums["acceptance"] if value is not None]
    bounds = [figure.name for figure in figures_of(theorem)]
    bounded = table_of([theorem], figures=bounds, bare=bounds)
    measured = {"acceptance, measured": sum(acceptance) / len(acceptance)}
    length = theorem.setting["max_new_tokens"]
    title = f"{len(theorem.units)} prompts, at most {length} tokens"
    tables = [replace(bounded, title=title, rows=[measured | bounded.rows[0]])]
    if lemmas:
        figures = ("regret", "regret_bound")
        forms = {FIGURES[name].words: ".4f" for name in figures}
        names = ("rule", "alpha", "lemma")
        found = table_of(lemmas, names, figures, bare=figures, formats=forms | {"alpha": "g"})
        lines = [
            line | {"positions outside": _outside(row)}
            for row, line in zip(lemmas, found.rows, strict=True)
        ]
        tables.append(replace(found, rows=lines))
    return printed(*tables)


def _outside(row: Row) -> str:
    outside, of = (sum(filter(None, row.sums[key])) for key in ("violations", "positions"))
    return f"{outside:,.0f} of {of:,.0f}"
