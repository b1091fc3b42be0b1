"""Reads the run directory of a bench: rows by temperature, and the manifest."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import ValidationError

from paceline.bench.answers import context_of, key_of, read_rows
from paceline.bench.settings import setting_of
from paceline.bench.workbench import Grid, cell_key
from paceline.config import fields_of
from paceline.core.rule_base import Rule, name_of
from paceline.core.rules import DEFAULT_RULES, RULES
from paceline.decode.strategies import STRATEGIES
from paceline.errors import ConfigError, UsageError
from paceline.extensions import imported_variants
from paceline.permissions import Origin
from paceline.records import RunDirectory
from paceline.results.frontier import TARGET_ALONE, Frontier, family_of
from paceline.view.page import grouped, sampling_words

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from paceline.results.row import Label, Row


def _texts(setting: Mapping[str, Any], kind: type) -> list[str]:
    """The settings of a rule that are texts, its name among them."""
    values = (setting.get(key) for key in fields_of(kind))
    return [value for value in values if isinstance(value, str)]


_BUILT_IN: dict[str, type] = {
    **{name_of(kind): kind for kind in sorted(RULES, key=lambda kind: not kind.is_baseline)},
    **STRATEGIES,
}
"""Related rules next to each other, as in the papers, then the strategies."""
_VARIANTS = [_texts(vars(rule), type(rule)) for rule in DEFAULT_RULES]


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
    """Settings of the manifest's grid by their keys; none if it names code or is of old."""
    try:
        grid = (manifest or {})["config"]["grid"]
        cells = Grid.model_validate(grid, context=Origin.RESULTS).cells()
    except (KeyError, ValidationError, ConfigError):
        return {}
    return {cell_key(context, cell): setting_of(cell) for cell in cells}


def ordered_cells(frontier: Frontier) -> list[Row]:
    """The cells in lines of a chart: by family, gamma (or fallback) and threshold.

    Related families are next to each other; the target alone is left out.
    """
    return sorted((row for row in frontier.rows if family_of(row) != TARGET_ALONE), key=_place)


def _place(row: Row) -> tuple[Any, ...]:
    """By rule or strategy, its variant, family, gamma, and the other numbers of the setting."""
    setting = row.setting
    kinds = _BUILT_IN | {name_of(kind): kind for kind in imported_variants(Rule)}
    strategy, rule = str(setting.get("strategy")), str(setting.get("rule"))
    fields = [key for name in (strategy, rule) if name in kinds for key in fields_of(kinds[name])]
    known = (setting.get(key, 0.0) for key in ("gamma", *fields))
    numbers = [value for value in known if isinstance(value, int | float)]
    texts = _texts(setting, kinds[rule]) if rule in kinds else []
    places = {kind: place for place, kind in enumerate(kinds)}
    return (
        places.get(rule if strategy == "speculative" else strategy, len(places)),
        _VARIANTS.index(texts) if texts in _VARIANTS else -1,
        family_of(row),
        *numbers,
    )
