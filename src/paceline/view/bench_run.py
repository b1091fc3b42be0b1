"""Reads the run directory of a bench: rows by temperature, and the manifest."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import ValidationError

from paceline.bench.answers import context_of, key_of, read_rows
from paceline.bench.settings import TARGET_BONUS, setting_of
from paceline.bench.workbench import Grid, cell_key
from paceline.errors import UsageError
from paceline.permissions import Origin
from paceline.records import RunDirectory
from paceline.results.frontier import TARGET_ALONE, Frontier, family_of
from paceline.view.page import grouped, sampling_words

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
        rows: Finished and failed cells.
        missing: Settings of the cells of the manifest's grid without a row.
    """

    name: str
    rows: Sequence[Row]
    missing: Sequence[dict[str, Label]]

    @property
    def done(self) -> list[Row]:
        """The finished cells."""
        return [row for row in self.rows if not row.error]

    @cached_property
    def frontier(self) -> Frontier | None:
        """None if the target alone has no finished cell."""
        answered = any(family_of(row) == TARGET_ALONE for row in self.done)
        return Frontier(self.done) if answered else None

    @property
    def empty_families(self) -> list[str]:
        """Families in the grid without a finished cell."""
        asked = [*(row.setting for row in self.rows), *self.missing]
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


class Results(NamedTuple):
    """Contents of a run directory: rows, cells by sampling parameters, and the manifest."""

    rows: Sequence[Row]
    parts: Sequence[Cells]
    manifest: dict[str, Any] | None


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
    measured = grouped(rows, lambda row: sampling_words(row.setting))
    left = grouped(missing, sampling_words)
    every = grouped([*(row.setting for row in rows), *planned.values()], sampling_words)
    names = sorted(every, key=lambda name: float(every[name][0]["temperature"]))
    parts = [Cells(name, measured.get(name, []), left.get(name, [])) for name in names]
    return Results(rows, parts, manifest)


def _planned(manifest: dict[str, Any] | None, context: str) -> dict[str, dict[str, Label]]:
    """Settings of the manifest's grid by their keys; none if another version wrote it."""
    try:
        grid = (manifest or {})["config"]["grid"]
        cells = Grid.model_validate(grid, context=Origin.RESULTS).cells()
    except (KeyError, ValidationError):
        return {}
    return {cell_key(context, cell): setting_of(cell) for cell in cells}


def ordered_cells(frontier: Frontier) -> list[Row]:
    """The cells in lines of a chart: by family, gamma (or fallback) and threshold.

    Related families are next to each other; the target alone is left out.
    """
    places = {name: place for place, name in enumerate(_ORDER)}

    def place(row: Row) -> tuple[int, str, float, float]:
        # A bench has one bonus, so the families of rules with either are in one place.
        known = places.get(family_of(row).removesuffix(f" {TARGET_BONUS}"), len(places))
        return known, family_of(row), _first(row, _LENGTHS), _first(row, _THRESHOLDS)

    return sorted((row for row in frontier.rows if family_of(row) != TARGET_ALONE), key=place)


def _first(row: Row, names: Sequence[str]) -> float:
    """The first of these settings that the row has; else 0."""
    return next((float(row.setting[name]) for name in names if name in row.setting), 0.0)
