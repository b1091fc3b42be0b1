"""Reads the run directory of a bench: rows by temperature, and the manifest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import ValidationError

from paceline.bench.answers import context_of, key_of, read_rows
from paceline.bench.settings import TARGET_BONUS, setting_of
from paceline.bench.workbench import Grid, cell_key
from paceline.errors import UsageError
from paceline.permissions import Origin
from paceline.records import RunDirectory
from paceline.results.frontier import TARGET_ALONE, Frontier, family_of
from paceline.view.page import sampling_words

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from paceline.results.row import Label, Row

_ORDER = (  # related families next to each other, as in the papers
    *("lossless", "lossy beta 1.0", "lossy beta tuned"),
    *("lenient linear", "lenient square", "lenient exponential"),
    *("bild", "chow", "chow_log", "diff", "diff_log", "opt", "opt_log"),
    *("token_v1", "token_v2", "token_v3"),
    *("token_cascade", "sequence_cascade", "sequence_cascade normalised", "big_little"),
)
_THRESHOLDS = ("alpha", "epsilon", "threshold", "rollback")
_LENGTHS = ("gamma", "fallback")


@dataclass(frozen=True)
class Cells:
    """The cells with one set of sampling parameters.

    Attributes:
        name: Such as `temperature 0.7, top-p 0.9`.
        frontier: None if the target alone has no finished cell.
        done: Finished cells.
        failed: Failed cells.
        missing: Settings of the cells of the manifest's grid without a row.
    """

    name: str
    frontier: Frontier | None
    done: Sequence[Row]
    failed: Sequence[Row]
    missing: Sequence[dict[str, Label]]

    @property
    def empty_families(self) -> list[str]:
        """Families in the grid without a finished cell."""
        asked = [*(row.setting for row in self.failed), *self.missing]
        names = {str(setting["family"]) for setting in asked}
        return sorted(names - {family_of(row) for row in self.done})

    @property
    def judged(self) -> Frontier | None:
        """The frontier if quality and speed can be compared; else None, see `silence`."""
        return None if self.silence else self.frontier

    @property
    def silence(self) -> str:
        """Why quality and speed cannot be compared; empty if they can."""
        if self.frontier is None:
            return (
                "The target alone has no finished cell here, so there is nothing to compare "
                f"{len(self.done)} finished cells with; run the bench again."
            )
        if "score" not in self.frontier.target.sums:
            return "The task has no metric, so there is no quality to compare with speed."
        if not self.frontier.value("quality", self.frontier.target) > 0:
            return "The target's own quality is 0, so quality / target's is undefined."
        return ""


@dataclass(frozen=True)
class Results:
    """Contents of a run directory."""

    rows: Sequence[Row]
    parts: Sequence[Cells]
    manifest: dict[str, Any] | None


class Curve(NamedTuple):
    """Cells of a family that differ only in the threshold, sorted by it."""

    name: str
    length: float
    cells: list[Row]


def read_results(folder: Path) -> Results:
    """Read a run directory; raises UsageError if it has no rows or an invalid one."""
    manifest = RunDirectory(folder).read_manifest()
    rows = read_rows(folder, (manifest or {}).get("context"))
    if not rows:
        other = "only result rows of another bench" if read_rows(folder) else "no result rows"
        raise UsageError(f"{folder} has {other}; run `paceline bench` with this output first")
    planned = _planned(manifest, context_of(rows[0]))
    if planned:
        rows = [row for row in rows if not row.error or key_of(row) in planned]
    tried = {key_of(row) for row in rows}
    missing = [setting for key, setting in planned.items() if key not in tried]
    samplings: dict[str, dict[str, Label]] = {}
    for setting in [*(row.setting for row in rows), *planned.values()]:
        samplings.setdefault(sampling_words(setting), setting)
    ordered = sorted(samplings, key=lambda name: float(samplings[name]["temperature"]))
    return Results(
        rows=rows,
        parts=[
            _cells(
                name,
                [row for row in rows if sampling_words(row.setting) == name],
                [setting for setting in missing if sampling_words(setting) == name],
            )
            for name in ordered
        ],
        manifest=manifest,
    )


def _cells(name: str, rows: Sequence[Row], missing: Sequence[dict[str, Label]]) -> Cells:
    done = [row for row in rows if not row.error]
    answered = any(family_of(row) == TARGET_ALONE for row in done)
    failed = [row for row in rows if row.error]
    return Cells(name, Frontier(done) if answered else None, done, failed, missing)


def _planned(manifest: dict[str, Any] | None, context: str) -> dict[str, dict[str, Label]]:
    """Settings of the manifest's grid by their keys; none if another version wrote it."""
    try:
        grid = (manifest or {})["config"]["grid"]
        cells = Grid.model_validate(grid, context=Origin.RESULTS).cells()
    except (KeyError, ValidationError):
        return {}
    return {cell_key(context, cell): setting_of(cell) for cell in cells}


def curves(frontier: Frontier) -> list[Curve]:
    """A curve per family and gamma (or fallback), related families next to each other."""
    families = {name: rows for name, rows in frontier.families().items() if name != TARGET_ALONE}
    places = {name: place for place, name in enumerate(_ORDER)}

    def place(name: str) -> tuple[int, str]:
        # A bench has one bonus, so the families of rules with either are in one place.
        return places.get(name.removesuffix(f" {TARGET_BONUS}"), len(places)), name

    found: list[Curve] = []
    for name in sorted(families, key=place):
        for length in sorted({_first(row, _LENGTHS) for row in families[name]}):
            alike = [row for row in families[name] if _first(row, _LENGTHS) == length]
            ordered = sorted(alike, key=lambda row: _first(row, _THRESHOLDS))
            found.append(Curve(name, length, ordered))
    return found


def _first(row: Row, names: Sequence[str]) -> float:
    """The first of these settings that the row has; else 0."""
    return next((float(row.setting[name]) for name in names if name in row.setting), 0.0)
