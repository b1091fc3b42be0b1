"""Reads the run directory of a bench: rows by temperature, and the manifest."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import ValidationError

from paceline.bench.answers import SAMPLED, context_of, key_of, read_rows
from paceline.bench.settings import setting_of
from paceline.bench.workbench import Grid, cell_key
from paceline.errors import ConfigError, UsageError
from paceline.permissions import Origin
from paceline.records import RunDirectory
from paceline.results.frontier import TARGET_ALONE, Frontier, family_of
from paceline.view.page import grouped, sampling_words

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from paceline.results.row import Label, Row


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
    measured = grouped(rows, lambda row: _sampling(row.setting))
    left = grouped(missing, _sampling)
    every = grouped([*(row.setting for row in rows), *planned.values()], _sampling)
    parts = [
        Cells(sampling_words(every[key][0]), measured.get(key, []), left.get(key, []))
        for key in sorted(every)
    ]
    return Results(rows, parts, manifest)


def _sampling(setting: Mapping[str, Label]) -> tuple[float, ...]:
    """The sampling parameters, the temperature first."""
    return tuple(float(setting.get(name, 0)) for name in SAMPLED)


def _planned(manifest: dict[str, Any] | None, context: str) -> dict[str, dict[str, Label]]:
    """Settings of the manifest's grid by their keys; none if it names code or is of old."""
    try:
        grid = (manifest or {})["config"]["grid"]
        cells = Grid.model_validate(grid, context=Origin.RESULTS).cells()
    except (KeyError, ValidationError, ConfigError):
        return {}
    return {cell_key(context, cell): setting_of(cell) for cell in cells}


def ordered_cells(frontier: Frontier) -> list[Row]:
    """The cells in lines of a chart: by family, gamma (or fallback) and threshold.

    The target alone is left out.
    """
    return sorted((row for row in frontier.rows if family_of(row) != TARGET_ALONE), key=_place)


def _place(row: Row) -> tuple[Any, ...]:
    """Family, gamma, and the other numbers of the setting."""
    numbers = [value for value in row.setting.values() if isinstance(value, int | float)]
    return (family_of(row), row.setting.get("gamma", 0), *numbers)
