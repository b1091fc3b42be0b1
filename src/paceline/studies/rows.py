"""Result rows of studies: per-example sums of one setting, and where they come from.

Claims and reports need only these rows. A figure of a row is a ratio of sums over its units, such
as tokens / blocks, so rows of several looks can be pooled.
"""

from __future__ import annotations

import gzip
import json
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, ValidationError, model_validator

from paceline.config import StrictModel, describe
from paceline.data.text_files import read_lines
from paceline.decode.strategies import DecodingConfig
from paceline.errors import UsageError
from paceline.permissions import Origin
from paceline.records import atomic_write_bytes
from paceline.studies.study_file import Label

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

SCHEMA_VERSION = 1


class Source(StrictModel):
    """Where a row comes from.

    Attributes:
        stage: The stage of the study.
        command: The command of the stage, with the configuration file that the study wrote.
        commit: Commit of Paceline; `modified` if the source differs from it.
        machine: Processor, its instruction set and its number of logical cores (threads); then the
            GPU, if the process of the stage used one.
        versions: Versions of Python and of the packages.
        fingerprints: Of the models and texts that the command read.
        date: Day on which the command ended, such as 2026-11-25; None in older rows.
        sizes: Number of parameters of `target`, `draft` and `truth`, of those that are known.
    """

    stage: str
    command: str
    commit: str | None
    modified: bool
    machine: str
    versions: dict[str, str]
    fingerprints: dict[str, str]
    date: str | None = None
    sizes: dict[str, int] = Field(default_factory=dict)


class StudyRow(StrictModel):
    """One setting of a study on one set of examples.

    Attributes:
        covers: Items of the papers.
        population: Name of the examples. Rows with the same population and unit share examples.
        units: Numbers of the examples, or seeds of training.
        setting: What was done: task, draft, temperature, rule and so on.
        sums: Named values of each unit; None where a value was not measured.
        decoding: Of a cell of a bench; None for other rows.
    """

    schema_version: Literal[1] = SCHEMA_VERSION
    study: str
    covers: tuple[str, ...]
    population: str
    units: tuple[int, ...]
    setting: dict[str, Label]
    sums: dict[str, tuple[float | None, ...]] = Field(min_length=1)
    decoding: DecodingConfig | None = None
    source: Source

    @model_validator(mode="after")
    def _has_a_value_per_unit(self) -> StudyRow:
        for name, values in self.sums.items():
            if len(values) != len(self.units):
                raise ValueError(f"{name} has {len(values)} values for {len(self.units)} units")
        return self


def write_rows(path: Path, rows: Iterable[StudyRow]) -> None:
    """Write all rows, compressed if the name ends with .gz; equal rows give equal files.

    Raises:
        StorageError: the file cannot be written; an existing one is unchanged.
    """
    text = "".join(json.dumps(row.model_dump(mode="json")) + "\n" for row in rows)
    content = text.encode()
    if path.suffix == ".gz":
        content = gzip.compress(content, mtime=0)
    atomic_write_bytes(path, content)


def read_study_rows(path: Path) -> list[StudyRow]:
    """Read rows.

    Raises:
        UsageError: the file is missing, or a row has another version or is malformed.
    """
    if not path.exists():
        raise UsageError(f"no result rows at {path}; run the study first, or give its directory")
    return [_row(values, f"{path} row {number}") for number, values in enumerate(_read(path), 1)]


def _read(path: Path) -> Iterator[Any]:
    try:
        for line, _ in read_lines(path):
            yield json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not a file of result rows ({error}); run the study") from None


def _row(values: Any, where: str) -> StudyRow:
    version = values.get("schema_version") if isinstance(values, dict) else None
    if version != SCHEMA_VERSION:
        raise UsageError(
            f"{where} has schema_version {version}, this Paceline reads {SCHEMA_VERSION}; run the "
            "study again: finished stages are kept"
        )
    try:
        return StudyRow.model_validate(values, context=Origin.RESULTS)
    except ValidationError as error:
        raise UsageError(f"{where} is not a result row: {describe(error)}") from None


def pooled(rows: Sequence[StudyRow]) -> StudyRow:
    """Rows of the same setting and population, with the units of all.

    Raises:
        UsageError: two of them have the same unit, or other names of sums.
    """
    first, *others = rows
    if not others:
        return first
    units = [unit for row in rows for unit in row.units]
    if len(set(units)) < len(units) or any(row.sums.keys() != first.sums.keys() for row in others):
        raise UsageError(
            f"two rows of {first.study} measure the same examples of {first.population} with "
            f"{first.setting}; remove one, or label the stages apart"
        )
    sums = {name: tuple(value for row in rows for value in row.sums[name]) for name in first.sums}
    return first.model_copy(update={"units": tuple(units), "sums": sums})
