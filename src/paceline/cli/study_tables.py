"""Tables and JSON of `study` and `claims`."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table

from paceline.cli.console import echo
from paceline.results.figures import FIGURES, figures_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.results.row import Row
    from paceline.studies.run import StageState
    from paceline.studies.study_file import StudyConfig
    from paceline.studies.verdicts import Finding

_CLAIMS_LEGEND = """\
effect: of the first side over the second, as `compare` says; brackets: interval at the claim's
own level, so that any wrong verdict of a paper has at most the probability of the claims file.
paper: whether the size that the paper reports is in the interval, larger or smaller; empty: it
gives no such number. n: examples, or positions of a check. --details says more."""
_SHORT = {"too small to matter": "too small", "known by algebra": "by algebra"}


def print_json(value: Any) -> None:
    """Print JSON to stdout."""
    echo(json.dumps(value, indent=2))


def study_list(studies: dict[str, StudyConfig]) -> Table:
    """Name, title and items of the papers of each study."""
    table = Table("study", "title", "covers", box=None, pad_edge=False)
    for name, study in studies.items():
        table.add_row(name, study.title, ", ".join(covered(study)))
    return table


def covered(study: StudyConfig) -> list[str]:
    """Items of the papers, without repetition."""
    return list(dict.fromkeys(item for stage in study.stages.values() for item in stage.covers))


def stage_table(study: StudyConfig, found: Sequence[StageState]) -> Group:
    """The stages with expected minutes and disk; sums are of those that are not done."""
    table = Table(box=None, pad_edge=False)
    for name in ("stage", "command", "state"):
        table.add_column(name)
    for name in ("minutes, 2 cores", "minutes, GPU", "disk, MB"):
        table.add_column(name, justify="right")
    for stage, is_done in found:
        state = "done" if is_done else "to run"
        numbers = (stage.minutes_cpu, stage.minutes_gpu, stage.disk_mb)
        table.add_row(stage.name, stage.command, state, *(f"{number:g}" for number in numbers))
    left = [stage for stage, is_done in found if not is_done]
    sums: list[float] = [
        sum(getattr(stage, name) for stage in left)
        for name in ("minutes_cpu", "minutes_gpu", "disk_mb")
    ]
    sums[0] /= study.workers  # stages run at the same time
    table.add_row("to run, in all", "", "", *(f"{number:g}" for number in sums))
    covers = f"covers: {', '.join(covered(study))}"
    return Group(study.title, table, covers)


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
    parts: list[Table | str] = []
    for paper in dict.fromkeys(one.claim.paper for one in found):
        own = [one for one in found if one.claim.paper == paper]
        parts.append(_verdict_table(paper, own))
    if checks:
        parts.append(_verdict_table("Theorems, identities and algebra", checks))
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
    return Group(*parts, *lines, *absent, _CLAIMS_LEGEND)


def _counts(findings: Sequence[Finding], order: Sequence[str] = ()) -> str:
    counts = Counter(one.verdict for one in findings)
    names = [*order, *(name for name in counts if name not in order)]
    return ", ".join(f"{counts[name]} {name}" for name in names if counts[name])


def _verdict_table(title: str, findings: Sequence[Finding]) -> Table:
    table = Table(title, "verdict", "effect", "paper", "n", box=None, pad_edge=False)
    for one in findings:
        table.add_row(
            one.claim.id,
            _SHORT.get(one.verdict, one.verdict),
            one.effect_text,
            one.size.partition(" ")[0],
            str(one.num_units or ""),
        )
    return table


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
    table = Table(box=None, pad_edge=False)
    for name in ("", "value"):
        table.add_column(name, justify="right" if name else "left")
    measured = [value for value in theorem.sums["acceptance"] if value is not None]
    table.add_row("acceptance, measured", f"{sum(measured) / len(measured):,.3f}")
    for figure in figures_of(theorem):
        table.add_row(figure.words, f"{figure.value(theorem):,.3f}")
    parts: list[Table] = [table]
    if lemmas:
        regret = Table(box=None, pad_edge=False)
        for name in ("rule and alpha", "lemma", "regret", "bound", "positions outside"):
            regret.add_column(name, justify="left" if name.startswith("rule") else "right")
        for row in lemmas:
            values = (f"{FIGURES[name].value(row):.4f}" for name in ("regret", "regret_bound"))
            outside, of = (sum(filter(None, row.sums[key])) for key in ("violations", "positions"))
            rule = f"{row.setting['rule']} {row.setting['alpha']:g}"
            where = f"{outside:,.0f} of {of:,.0f}"
            regret.add_row(rule, str(row.setting["lemma"]), *values, where)
        parts.append(regret)
    length = theorem.setting["max_new_tokens"]
    return Group(*parts, f"{len(theorem.units)} prompts, at most {length} tokens")
