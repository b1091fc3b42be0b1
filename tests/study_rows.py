"""Rows of studies made by hand: what stages would have measured, without models."""

from collections.abc import Sequence
from typing import Any

from paceline.results.row import Source
from paceline.studies.rows import StudyRow

SOURCE = Source(
    stage="tau",
    command="paceline trajectory --config tau.yaml",
    commit=None,
    modified=False,
    machine="a machine",
    versions={},
    fingerprints={},
)


def study_row(
    sums: dict[str, Sequence[float | None]],
    units: Sequence[int] | None = None,
    *,
    population: str = "prompts",
    study: str = "tiny",
    source: Source = SOURCE,
    **setting: Any,
) -> StudyRow:
    """A row; without `units` they are counted from 0."""
    count = len(next(iter(sums.values())))
    return StudyRow(
        study=study,
        covers=("Table 1",),
        population=population,
        units=tuple(range(count) if units is None else units),
        setting=setting,
        sums={name: tuple(values) for name, values in sums.items()},
        source=source,
    )


def claim(test: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A claim of the study `tiny` with this test."""
    values = {
        "id": "one",
        "paper": "DistillSpec",
        "item": "Table C.1",
        "says": "more",
        "size": {"text": "direction only"},
        "fixed": "2026-11-25",
        "here": "more here",
        "study": "tiny",
    }
    return values | {"test": test} | changes
