"""The result row: what was measured on each unit (example, text, seed), and where it comes from.

A row is one setting, such as a draft at gamma 5 and temperature 1. Its sums are the counts, seconds
and scores of each unit. A figure is a ratio of their totals, such as tokens / target calls, so rows
can be compared in pairs and resampled without the models. `results.figures` defines all.

    units          sums["emitted"]    sums["calls"]
    prompt 0       21                 7
    prompt 1       30                 10          block efficiency = (21 + 30) / (7 + 10) = 3

Names of sums:

    tokens, prefill_tokens      new tokens of a text; those that come with its prompt
    emitted, calls              tokens of blocks; target passes without the prompt's. Of scored
                                text: expected numbers, for the setting's gamma
    acceptance, greedy_acceptance, agreement
                                of the tokens of a scored text: sum of 1 - TVD(p, q), sum of
                                p(argmax q), number of tokens with argmax q = argmax p
    output_tvd, output_kl, surprisal
                                of the tokens of a text: sums of the distances of a rule's output to
                                the target's distribution, and of -log p over it, in nats
    expected_examined, expected_rejected
                                expected numbers of drafted tokens of a rule along a text
    cross_entropy               of the same tokens: sum of -p log q over the vocabulary, in nats
    drafted, accepted, examined, rejected
                                drafted tokens; examined: accepted, and a block's first rejected
    position_accepted           blocks that accept the drafted token at the setting's position
    score, target_score         of an answer, in [0, 1]; of the target's answer to it
    seconds, first_seconds, first_tokens
                                of a request; until its first tokens, and their number
    target_seconds, target_first_seconds, target_tokens, target_first_tokens
                                of the same request with the target alone, timed by turns
    identical, ties             of a greedy text: whether it is the target's, or differs at a tie
"""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from pydantic import Field, ValidationError, model_validator

from paceline.config import Result, StrictModel, describe
from paceline.environment import environment
from paceline.errors import UsageError
from paceline.permissions import Origin
from paceline.records import SCHEMA_VERSION, atomic_write_text, read_jsonl

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    Item = TypeVar("Item")
    Key = TypeVar("Key", bound=Hashable)

FILE_NAME = "rows.jsonl"
"""Name of the file of rows in a run directory."""
Label = str | int | float


class Source(StrictModel):
    """Where a row comes from.

    Attributes:
        command: The command that wrote it.
        run: Directory of the training run that a draft comes from.
        commit: Commit of Paceline; `modified` if the source differs from it.
        machine: Processor, its instruction set and its number of logical cores; then the GPU, if
            the process used one.
        versions: Versions of Python and of the packages.
        fingerprints: Of the models and texts that the command read.
        date: Day, such as 2026-11-25.
        sizes: Number of parameters of the models by role, such as `target`.
    """

    command: str
    run: str = ""
    commit: str | None = None
    modified: bool = False
    machine: str = ""
    versions: dict[str, str] = Field(default_factory=dict)
    fingerprints: dict[str, str] = Field(default_factory=dict)
    date: str | None = None
    sizes: dict[str, int] = Field(default_factory=dict)

    @classmethod
    def here(cls, command: str, **more: Any) -> Source:
        """The source of a row that this process makes now."""
        record = environment()
        git = record.get("git") or {}
        level, cores = record.get("processor_level"), record.get("cpu_count")
        machine = f"{record.get('processor', 'unknown processor')} ({level}, {cores} cores)"
        return cls(
            command=command,
            commit=git.get("commit"),
            modified=bool(git.get("modified")),
            machine=f"{machine}, {record['gpu']}" if "gpu" in record else machine,
            versions={"python": record.get("python", "")} | record.get("versions", {}),
            date=datetime.now(tz=UTC).date().isoformat(),
            **more,
        )


class Row(Result):
    """One setting on one set of units.

    Attributes:
        population: Name of the units. Rows with the same population and unit share examples.
        units: Numbers of the examples or texts, or seeds of training.
        setting: What was done: task, draft, temperature, rule, gamma and so on.
        sums: Values of each unit by name; None where a value was not measured.
        totals: Figures of all units together or of no unit, such as corpus BLEU or the seconds of a
            pass.
        bounds: Their 95% intervals, where there are any.
        error: Why the setting could not be measured, in one line; the row then has no sums.
    """

    schema_version: Literal[1] = SCHEMA_VERSION
    population: str
    units: tuple[int, ...]
    setting: dict[str, Label]
    sums: dict[str, tuple[float | None, ...]] = Field(default_factory=dict)
    totals: dict[str, float] = Field(default_factory=dict)
    bounds: dict[str, tuple[float, float]] = Field(default_factory=dict)
    error: str = ""
    source: Source

    @model_validator(mode="after")
    def _has_a_value_per_unit(self) -> Row:
        for name, values in self.sums.items():
            if len(values) != len(self.units):
                raise ValueError(f"{name} has {len(values)} values for {len(self.units)} units")
        if not self.sums and not self.totals and not self.error:
            raise ValueError("a row needs sums, totals or an error")
        if unknown := self.bounds.keys() - self.totals.keys():
            raise ValueError(f"bounds of {min(unknown)}, which is not among the totals")
        return self

    @property
    def summary(self) -> str:
        """The units and the setting."""
        return f"{len(self.units)} {self.population}, {self.setting}"

    def has(self, **conditions: Label) -> bool:
        """Whether the row has these settings."""
        return all(self.setting.get(key) == value for key, value in conditions.items())

    def extended(
        self,
        sums: Mapping[str, Iterable[float] | Tensor] | None = None,
        totals: Mapping[str, float] | None = None,
        /,
        **setting: Label,
    ) -> Row:
        """The row with more settings, sums and totals; totals that are not finite are left out."""
        values = {name: tuple(map(float, part)) for name, part in (sums or {}).items()}
        finite = {name: value for name, value in (totals or {}).items() if math.isfinite(value)}
        changes = {"setting": self.setting | setting, "sums": self.sums | values}
        return self.model_copy(update=changes | {"totals": self.totals | finite})

    def only(self, units: Sequence[int]) -> Row:
        """The row with these units alone, in this order."""
        if self.units == tuple(units):
            return self
        places = {unit: place for place, unit in enumerate(self.units)}
        chosen = [places[unit] for unit in units]
        sums = {name: tuple(values[n] for n in chosen) for name, values in self.sums.items()}
        return self.model_copy(update={"units": tuple(units), "sums": sums})


def grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """The items by their keys, in order of appearance."""
    found: dict[Key, list[Item]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def select(rows: Iterable[Row], **conditions: Label) -> list[Row]:
    """The rows that have all of these settings."""
    return [row for row in rows if row.has(**conditions)]


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Write all rows; equal rows give equal files.

    Raises:
        StorageError: the file cannot be written; an existing one is unchanged.
    """
    atomic_write_text(path, "".join(f"{json.dumps(as_values(row))}\n" for row in rows))


def as_values(row: Row) -> dict[str, Any]:
    """The row as JSON values, without empty fields that have a default."""
    fields = type(row).model_fields
    values = row.model_dump(mode="json")
    return {key: value for key, value in values.items() if value or fields[key].is_required()}


def read_rows(path: Path) -> list[Row]:
    """Read the rows of a file, or of all runs in a directory.

    Raises:
        UsageError: there are no rows, or one has another version or is malformed.
    """
    if path.is_dir():
        files = sorted(path.rglob(FILE_NAME))
        rows = [row for file in files for row in read_rows(file)]
    else:
        files = [path] if path.exists() else []
        values = enumerate(read_jsonl(path), 1)
        rows = [_row(value, f"{path} row {number}") for number, value in values]
        # a cell that was measured again, or has predictions, has a row behind the earlier one
        rows = list({row.source.fingerprints.get("key", id(row)): row for row in rows}.values())
    if not files:
        raise UsageError(
            f"no result rows at {path}; name a file {FILE_NAME}, or the directory of a command "
            "that measures"
        )
    return rows


def _row(values: dict[str, Any], where: str) -> Row:
    version = values.get("schema_version", SCHEMA_VERSION)
    if version != SCHEMA_VERSION:
        raise UsageError(
            f"{where} has schema_version {version}, this Paceline reads {SCHEMA_VERSION}; run the "
            "command again, or read the row with the version that wrote it"
        )
    try:
        return Row.model_validate(values, context=Origin.RESULTS)
    except ValidationError as error:
        raise UsageError(f"{where} is not a result row: {describe(error)}") from None


def sums_of(units: Sequence[Mapping[str, float]]) -> dict[str, tuple[float | None, ...]]:
    """Sums of each unit as those of a row; None where a unit lacks one."""
    names = dict.fromkeys(name for sums in units for name in sums)
    return {
        name: tuple(float(sums[name]) if name in sums else None for sums in units) for name in names
    }


def rounded(values: Iterable[float] | Tensor, digits: int = 6) -> tuple[float | None, ...]:
    """Values of units as rows keep them; None for values that are not finite."""
    numbers = map(float, values)
    return tuple(round(value, digits) if math.isfinite(value) else None for value in numbers)
