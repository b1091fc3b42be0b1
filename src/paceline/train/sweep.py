"""Runs a grid of alignments over two dimensions, such as objective and text, and seeds.

Each cell is a run directory `output/ROW/COLUMN/seed-N`. A resumed sweep skips finished runs and
resumes the others.
"""

from __future__ import annotations

import gc
import json
import math
import os
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from pydantic import Field, model_validator

from paceline.config import HomePath, StrictModel, read_json, validate
from paceline.core.bootstrap import Interval, mean_interval
from paceline.data.input_checks import InputChecks, checked
from paceline.errors import ConfigError, DivergedError, TrainingError
from paceline.places import PathPart, refuse_links_out
from paceline.processes import in_processes
from paceline.progress import silent
from paceline.records import RunDirectory, atomic_write_text, config_hash
from paceline.results.row import Row, Source, read_rows, select, write_rows
from paceline.train.align import align
from paceline.train.checkpoint import check_run_directory
from paceline.train.config import AlignConfig

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from paceline.progress import Progress
    from paceline.results.row import Label

SEEDS = "seeds of training"
"""Population of rows whose units are runs."""
_TEXTS = "held_out"  # directory of held-out text, shared by the cells of a seed

Changes = dict[str, Any]
Figure = Literal[
    "expected_acceptance", "greedy_agreement", "block_efficiency", "rule_acceptance", "rule_tvd"
]


class SweepConfig(StrictModel):
    """Configuration of a sweep.

    Attributes:
        output: Directory of all runs; resumes if it exists.
        base: Configuration of `align`, shared by all runs.
        rows: Changes to `base` by row name.
        columns: Changes to `base` by column name; a row's changes override them.
        seeds: Seeds of each cell. Cells of the same seed share held-out text and are compared in
            pairs.
        figure: Figure to compare; a finished sweep can be read again with another figure.
        reference: Row that the others are compared with; None: the first.
        workers: Number of parallel runs, which share the cores; useful for small models.
    """

    output: HomePath
    base: Changes
    rows: dict[PathPart, Changes] = Field(min_length=1)
    columns: dict[PathPart, Changes] = Field(min_length=1)
    seeds: tuple[int, ...] = Field(default=(0, 1, 2), min_length=2)
    figure: Figure = "expected_acceptance"
    reference: str | None = None
    workers: int = Field(default=1, ge=1)

    @model_validator(mode="after")
    def _consistent(self) -> SweepConfig:
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds {self.seeds} has duplicates; remove them")
        if self.reference is not None and self.reference not in self.rows:
            raise ValueError(
                f"reference {self.reference} is not a row; choose one of {', '.join(self.rows)}"
            )
        for cell in cells_of(self):
            if not cell.config.data.evaluates:
                raise ConfigError(
                    f"{cell.row}, {cell.column} has no held-out text; set data.held_out"
                )
            if self.figure.startswith("rule_") and cell.config.evaluation.rule is None:
                raise ConfigError(f"{self.figure} needs evaluation.rule in base")
        return self

    def check(self, checks: InputChecks) -> None:
        """Check the inputs of all runs; raises UsageError."""
        for cell in cells_of(self):
            cell.config.check_inputs(checks)
        checks.output(self.output)


class Cell(NamedTuple):
    """One run of the sweep."""

    row: str
    column: str
    seed: int
    config: AlignConfig

    @property
    def name(self) -> str:
        return f"{self.row}, {self.column}, seed {self.seed}"


class Sweep(NamedTuple):
    """The figures of the aligned drafts: a row per cell, whose units are the seeds.

    A run that diverged has no values. `figure`: the one to compare; `reference`: name of the row
    that others are compared with.
    """

    rows: Sequence[Row]
    figure: str
    reference: str

    @classmethod
    def of(cls, rows: Sequence[Row], config: SweepConfig) -> Sweep:
        """As the configuration says."""
        return cls(rows, config.figure, config.reference or next(iter(config.rows)))

    def names(self, axis: Literal["row", "column"]) -> list[str]:
        """The rows or columns of the grid."""
        return list(dict.fromkeys(str(row.setting[axis]) for row in self.rows))

    @property
    def num_seeds(self) -> int:
        return len(self.rows[0].units)

    def cell(self, row: str, column: str) -> Interval:
        """Mean over seeds, with its interval; NaN if a run diverged."""
        return mean_interval(self._values(row, (column,))[0])

    def difference(self, row: str, columns: Iterable[str] | None = None) -> Interval:
        """Mean of `row` - `reference`, paired by column and seed; None: over all columns.

        Runs of a seed share held-out text, so columns are averaged first and seeds are the units.
        """
        chosen = self.names("column") if columns is None else tuple(columns)
        differences = self._values(row, chosen) - self._values(self.reference, chosen)
        return mean_interval(differences.mean(0))

    def _values(self, row: str, columns: Iterable[str]) -> torch.Tensor:
        """[columns, seeds]."""
        cells = [select(self.rows, row=row, column=column) for column in columns]
        values = [
            [math.nan if v is None else v for v in cell.sums[self.figure]] for (cell,) in cells
        ]
        return torch.tensor(values, dtype=torch.float64)


def sweep(config: SweepConfig, progress: Progress = silent) -> Sweep:
    """Execute all unfinished runs, seed by seed, and write the rows to `output/rows.jsonl`.

    Raises:
        ConfigError: a cell's texts are too short for the figure, or several workers are configured
            in a multi-process launch.
        UsageError: invalid model, text or setting.
        TrainingError: a run was stopped, or a worker died repeatedly; finished runs are kept.
        StorageError: a file could not be written; finished runs are kept.
    """
    checked(config)
    if config.workers > 1 and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            f"workers is {config.workers}, but each run already uses several processes; "
            "set workers to 1"
        )
    cells = list(cells_of(config))
    run = RunDirectory(config.output)
    run.check_kind(config)
    refuse_links_out(config.output)
    run.write_manifest(config)  # for reports
    results: dict[str, dict[str, Any]] = {}
    progress("runs", 0, len(cells))
    for cell, result in _results(config, cells):
        if "diverged" not in result and config.figure not in result:
            raise ConfigError(
                f"{cell.config.output} has no {config.figure}, because each held-out text is a "
                "single token; choose another figure"
            )
        results[cell.name] = result
        progress("runs", len(results), len(cells), cell.name)
    rows = list(_rows(config, cells, results))
    write_rows(config.output / "rows.jsonl", rows)
    return Sweep.of(rows, config)


def _rows(
    config: SweepConfig, cells: Sequence[Cell], results: Mapping[str, Mapping[str, Any]]
) -> Iterator[Row]:
    manifest = RunDirectory(cells[0].config.output).read_manifest() or {}
    source = Source.here("paceline sweep", fingerprints=manifest.get("inputs", {}))
    names = dict.fromkeys(["num_steps", "elapsed_s", config.figure])
    names |= dict.fromkeys(name for result in results.values() for name in result)
    figures = [name for name in names if name != "diverged"]
    for row in config.rows:
        for column in config.columns:
            own = [results[c.name] for c in cells if (c.row, c.column) == (row, column)]
            yield Row(
                population=SEEDS,
                units=config.seeds,
                setting={"row": row, "column": column},
                sums={name: tuple(result.get(name) for result in own) for name in figures},
                source=source,
            )


def drafts_of_sweep(folder: Path) -> list[tuple[Path, dict[str, Label]]]:
    """The runs of a sweep that did not diverge, with the settings of their drafts.

    -> none if the directory is no finished sweep. `draft` is the row, `trained_on` the column.
    """
    if not (folder / "rows.jsonl").exists():
        return []
    return [
        (
            run_directory(folder, str(row.setting["row"]), str(row.setting["column"]), seed),
            {"draft": row.setting["row"], "trained_on": row.setting["column"], "seed": seed},
        )
        for row in read_rows(folder / "rows.jsonl")
        if row.population == SEEDS
        for seed, num_steps in zip(row.units, row.sums["num_steps"], strict=True)
        if num_steps is not None
    ]


def setting_in_sweep(run: Path) -> dict[str, Label]:
    """The settings of a run's drafts, as `drafts_of_sweep`; none if it is of no finished sweep."""
    place = run.resolve()
    sweep = place.parent.parent.parent  # above its row, its column and itself
    return next((own for path, own in drafts_of_sweep(sweep) if path.resolve() == place), {})


def run_directory(output: Path, row: str, column: str, seed: int) -> Path:
    """The directory of a run."""
    return output / row / column / f"seed-{seed}"


def _results(config: SweepConfig, cells: Sequence[Cell]) -> Iterator[tuple[Cell, dict[str, Any]]]:
    result = partial(_result, texts=config.output / _TEXTS)
    if config.workers == 1:
        return ((cell, result(cell)) for cell in cells)
    return in_processes(
        result, cells, workers=config.workers, name=attrgetter("name"), failure=TrainingError
    )


def _result(cell: Cell, texts: Path) -> dict[str, Any]:
    """Execute a run, unless it has diverged before."""
    run = RunDirectory(cell.config.output)
    # a larger budget would stretch the schedule of a finished run
    check_run_directory(run, cell.config, resume=True, keep_budget=True)
    mark, digest = run.path / "diverged.json", config_hash(cell.config)
    known = read_json(mark) if mark.exists() else {}
    if known.get("config_hash") == digest:
        return {"diverged": known["error"]}
    try:
        align(cell.config, resume=True, texts=texts)
        gc.collect()  # frees models in reference cycles before the next run
    except DivergedError as error:
        known = {"config_hash": digest, "error": str(error)}
        atomic_write_text(mark, json.dumps(known) + "\n")
        return {"diverged": known["error"]}
    result = run.read_result()
    assert result is not None, "a finished run has a result"
    figures = {key: v for key, v in result["after"].items() if isinstance(v, int | float)}
    return {"num_steps": result["num_steps"], "elapsed_s": result["elapsed_s"]} | figures


def cells_of(config: SweepConfig) -> Iterator[Cell]:
    """All runs, seed by seed."""
    for seed in config.seeds:
        for row, of_row in config.rows.items():
            for column, of_column in config.columns.items():
                output = run_directory(config.output, row, column, seed)
                values = _merged(_merged(config.base, of_column), of_row)
                values |= {"seed": seed, "output": str(output)}
                yield Cell(row, column, seed, validate(AlignConfig, values))


def _merged(values: Changes, changes: Changes) -> Changes:
    """Override values recursively; a section that sets its kind or rule is replaced."""
    merged = dict(values)
    for key, new in changes.items():
        old = merged.get(key)
        if isinstance(old, dict) and isinstance(new, dict) and not _replaces(old, new):
            new = _merged(old, new)
        merged[key] = new
    return merged


def _replaces(old: Changes, new: Changes) -> bool:
    return "kind" in new or isinstance(new.get("rule"), str) or ("rule" in new and "kind" in old)
