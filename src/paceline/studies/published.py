"""Verdicts in files: with their figures as JSON, and as tables for readers.

The rows of all studies are megabytes and are not kept with the source; the verdicts on them are. A
verdict names the digest of its claim, so that it does not stand for a claim that has changed since,
and its level, as each further claim of a paper makes that of all smaller.
"""

from __future__ import annotations

import hashlib
import json
from itertools import groupby
from typing import TYPE_CHECKING, Any

from paceline.config import as_written, read_json
from paceline.core.bootstrap import Interval
from paceline.records import atomic_write_text
from paceline.studies.verdicts import UNMEASURED, Finding

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from paceline.studies.claim_file import Claim, ClaimFile

_TEXTS = ("reason", "command", "note", "earlier")
_CHECKS = "Theorems, identities and algebra"
_HEAD = """\
| claim | tested here | effect | the paper's size | n | verdict |
|---|---|---|---|---|---|
"""


def write_verdicts(findings: Sequence[Finding], folder: Path) -> None:
    """Write `verdicts.json`, with six significant digits of effects, and `verdicts.md`.

    Raises:
        StorageError: a file cannot be written.
    """
    lines = [json.dumps(_values(one), ensure_ascii=False) for one in findings]
    path = folder / "verdicts.json"
    atomic_write_text(path, "[\n" + ",\n".join(lines) + "\n]\n")
    rounded = [
        _finding(one.claim, values, 1.0)
        for one, values in zip(findings, read_json(path), strict=True)
    ]
    atomic_write_text(folder / "verdicts.md", as_markdown(rounded))


def _values(one: Finding) -> dict[str, Any]:
    figures = {"first": one.first, "second": one.second}
    values: dict[str, Any] = {"id": one.claim.id, "claim": _mark(one.claim), "verdict": one.verdict}
    if one.effect is not None:
        values["effect"] = [_short(bound) for bound in one.effect]
    values |= {name: _short(value) for name, value in figures.items() if value is not None}
    values |= {"n": one.num_units} if one.num_units else {}
    values |= {"level": _short(one.level)} if one.level else {}
    return values | {name: text for name in _TEXTS if (text := getattr(one, name))}


def _short(value: float) -> float:
    return float(f"{value:.6g}")


def _mark(claim: Claim) -> str:
    """Digest of what the verdict depends on."""
    values = claim.model_dump(mode="json", include={"paper", "study", "algebra", "test"})
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:8]


def read_verdicts(path: Path, file: ClaimFile) -> list[Finding]:
    """The verdicts of these claims; a claim without one, or that has changed, is not measured.

    Raises:
        ConfigError: the file is not one that `write_verdicts` wrote.
        UsageError: it cannot be read.
    """
    with as_written(path):
        known = {values["id"]: values for values in read_json(path)}
        levels = {claim.id: file.level.get(claim.paper, 1.0) for claim in file.claims}
        return [_finding(claim, known.get(claim.id), levels[claim.id]) for claim in file.claims]


def _finding(claim: Claim, values: dict[str, Any] | None, level: float) -> Finding:
    lacks = "" if values else "it was not judged yet"
    if values and values["claim"] != _mark(claim):
        lacks = "the claim has changed since it was judged"
    elif values and not claim.is_check and values.get("level", 0.0) > level * (1 + 1e-5):
        lacks = "there are more claims since it was judged, so its error rate is smaller"
    if values is None or lacks:
        reason = claim.awaits or f"{lacks}; run its study"
        return Finding(claim, UNMEASURED, None, None, None, 0, reason, "")
    effect = values.get("effect")
    return Finding(
        claim=claim,
        verdict=values["verdict"],
        effect=None if effect is None else Interval(*effect),
        first=values.get("first"),
        second=values.get("second"),
        num_units=values.get("n", 0),
        level=values.get("level", 0.0),
        **{name: values.get(name, "") for name in _TEXTS},
    )


def as_markdown(findings: Sequence[Finding]) -> str:
    """Tables of all verdicts by paper and sentence, as Markdown."""
    tested = [one for one in findings if not one.claim.is_check]
    checks = [one for one in findings if one.claim.is_check]
    parts = [(paper, list(own)) for paper, own in groupby(tested, lambda one: one.claim.paper)]
    text = "# Verdicts on the claims of three papers\n\nWritten by `paceline claims --save`.\n"
    for title, own in [*parts, (_CHECKS, checks)]:
        text += f"\n## {title}\n" + "".join(_sentences(own))
    return text


def _sentences(findings: Sequence[Finding]) -> Iterator[str]:
    for _, group in groupby(findings, lambda one: one.claim.sentence or one.claim.id):
        own = list(group)
        claim = own[0].claim
        sizes = dict.fromkeys(one.claim.size.text for one in own)
        remarks = dict.fromkeys(text for one in own if (text := one.claim.remark))
        lines = [f'**{claim.item}**: "{claim.says}"', f"Size in the paper: {'; '.join(sizes)}."]
        lines += [*remarks, _fixed(claim)]
        yield f"\n{' '.join(lines)}\n\n{_HEAD}" + "".join(map(_line, own))


def _fixed(claim: Claim) -> str:
    known = f"knowing {claim.known}" if claim.known else "before any row was known"
    return f"Fixed on {claim.fixed}, {known}."


def _line(one: Finding) -> str:
    verdict = f"**{one.verdict}**" + (f": {one.reason}" if one.reason else "")
    verdict += f" ({one.note})" if one.note else ""
    claim = one.claim
    cells = [f"`{claim.id}`", claim.here, one.effect_text, one.size, str(one.num_units or "")]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in (*cells, verdict)) + " |\n"
