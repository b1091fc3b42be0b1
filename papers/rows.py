"""Rows of the studies: a line per draw and setting, with sums over its examples.

They are made from the rows that Paceline's commands write, whose units are examples. Every line has
the garden's seed, the digest of the claims that were fixed before it, Paceline's commit, and the
processor with its level.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import pandas as pd

from papers.statistics import PAPERS, digest_of_claims

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from paceline.results import Row

SETTINGS = ("task", "label", "temperature", "gamma", "family", "alpha")
SUMS = (
    *("tokens", "emitted", "calls", "acceptance", "cross_entropy", "score"),
    *("examined", "rejected"),
)


def lines_of(rows: Iterable[Row], **labels: Any) -> list[dict[str, Any]]:
    """A line per row: labels, the row's settings, its number of examples, and its sums.

    The name of a draft is `ARM RATE`, or `start of ARM RATE` of the one that this run begins with.
    """
    return [
        labels
        | {key: row.setting[key] for key in SETTINGS if key in row.setting}
        | _arm(str(row.setting.get("draft", "")))
        | {"n": len(row.units)}
        | {key: _total(row.sums[key]) for key in SUMS if key in row.sums}
        | {"seconds": row.totals.get("elapsed_s"), "commit": (row.source.commit or "")[:12]}
        | {"machine": row.source.machine}
        for row in rows
    ]


def _arm(draft: str) -> dict[str, str]:
    arm, _, rate = draft.removeprefix("start of ").partition(" ")
    return {"draft": arm, "rate": rate}


def _total(values: Sequence[float | None]) -> float:
    return round(math.fsum(value for value in values if value is not None), 3)


def write(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    """Write lines as a table, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    pd.DataFrame(lines).assign(claims=digest_of_claims()).to_csv(part, index=False)
    part.replace(path)


def gather(name: str, garden: int, parts: Sequence[Path], qualities: Sequence[Path] = ()) -> None:
    """Write the rows of all draws of a garden beside the paper's README, and its quality.

    `qualities`: `quality.json` in the directory of each task.
    """
    path = PAPERS / name / "rows" / f"garden-{garden}.csv"
    path.parent.mkdir(exist_ok=True)
    pd.concat(map(pd.read_csv, parts), ignore_index=True).to_csv(path, index=False)
    if qualities:
        found = {one.parent.name: json.loads(one.read_text("utf-8")) for one in qualities}
        path.with_suffix(".json").write_text(json.dumps(found, indent=2) + "\n", "utf-8")


def read_quality() -> dict[int, dict[str, dict[str, float]]]:
    """Accuracies of the targets by garden and task; see `garden.quality`."""
    files = (PAPERS / "distillspec" / "rows").glob("garden-*.json")
    return {int(one.stem[7:]): json.loads(one.read_text("utf-8")) for one in files}


def read(name: str) -> pd.DataFrame:
    """The committed rows of a paper, of all gardens and draws."""
    files = sorted((PAPERS / name / "rows").glob("*.csv"))
    return pd.concat(map(pd.read_csv, files), ignore_index=True)
