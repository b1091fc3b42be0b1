"""Many alignments that differ in two ways, such as objective and text, with several seeds each.

A cell is an ordinary run directory, `output/ROW/COLUMN/seed-N`: a sweep that was stopped leaves out
what has ended and goes on with what has begun.
"""

from __future__ import annotations

import gc
import json
import math
import os
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from pydantic import Field, model_validator

from paceline.config import StrictModel, validate
from paceline.core.bootstrap import Interval, mean_interval
from paceline.errors import ConfigError, DivergedError, TrainingError
from paceline.processes import in_processes
from paceline.progress import silent
from paceline.records import RunDirectory, atomic_write_text, config_hash
from paceline.train.align import align
from paceline.train.align_config import AlignConfig
from paceline.train.checkpoint import check_run_directory

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from paceline.progress import Progress

_TEXTS = "held_out"  # beside the rows: what the target wrote for the cells of one seed

Changes = dict[str, Any]
Figure = Literal[
    "expected_acceptance", "greedy_agreement", "block_efficiency", "rule_acceptance", "rule_tvd"
]


class SweepConfig(StrictModel):
    """What is compared.

    Attributes:
        output: The directory of all runs.
        base: Of every run: what `align` can be told.
        rows: By name, what a row changes of that.
        columns: By name, what a column changes.
        seeds: Of every cell; they decide what is held out, too, so that cells of one seed are paired.
        figure: Of the aligned drafts; asked for another one, a sweep that has ended reads it.
        reference: The row that others are compared with; None: the first.
        workers: Processes that align at once, each with its share of the cores: small models gain
            nothing from more cores each.
    """

    output: Path
    base: Changes
    rows: dict[str, Changes] = Field(min_length=1)
    columns: dict[str, Changes] = Field(min_length=1)
    seeds: tuple[int, ...] = Field(default=(0, 1, 2), min_length=2)
    figure: Figure = "expected_acceptance"
    reference: str | None = None
    workers: int = Field(default=1, ge=1)

    @model_validator(mode="after")
    def _knows_its_reference(self) -> SweepConfig:
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds {self.seeds} repeat; the same run twice says nothing")
        if self.reference is not None and self.reference not in self.rows:
            raise ValueError(
                f"reference {self.reference} is no row; rows are {', '.join(self.rows)}"
            )
        for cell in cells_of(self):
            _check_figure(self, cell)
        return self


class Cell(NamedTuple):
    """One run of the sweep."""

    row: str
    column: str
    seed: int
    config: AlignConfig

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.row}, {self.column}, seed {self.seed}"


class Sweep(NamedTuple):
    """What the runs came to: the figure of each aligned draft, by row, column and seed.

    Of a run that diverged it is not a number, and so is everything that hangs on it.
    """

    config: SweepConfig
    figures: dict[tuple[str, str, int], float]

    def cell(self, row: str, column: str) -> Interval:
        """Mean over seeds; the interval says what other seeds may give."""
        return mean_interval(self._values(row, (column,)))

    def difference(self, row: str, other: str, columns: Iterable[str] | None = None) -> Interval:
        """Mean of `row` less `other`, paired by column and seed; None: over all columns.

        Runs of one seed share what is held out, so that a seed counts once, whatever its columns.
        """
        chosen = tuple(self.config.columns if columns is None else columns)
        less = self._values(row, chosen) - self._values(other, chosen)
        return mean_interval(less.reshape(len(chosen), -1).mean(0))

    @property
    def reference(self) -> str:
        """The row that others are compared with."""
        return self.config.reference or next(iter(self.config.rows))

    def _values(self, row: str, columns: Iterable[str]) -> torch.Tensor:
        seeds = self.config.seeds
        values = [self.figures[row, column, seed] for column in columns for seed in seeds]
        return torch.tensor(values, dtype=torch.float64)


def sweep(config: SweepConfig, progress: Progress = silent) -> Sweep:
    """Make every run that has not ended, seed by seed; `output/sweep.json` holds the figures.

    Raises:
        ConfigError: a cell's texts are too short for the figure, or workers are asked for where
            several processes were launched.
        UsageError: a model, a text or a setting cannot be used.
        TrainingError: a run was stopped, or a worker died again and again; what has ended stays.
        StorageError: something could not be written; what has ended stays.
    """
    if config.workers > 1 and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            f"workers is {config.workers}, but each run has several processes already; set workers to 1"
        )
    cells = list(cells_of(config))
    figures: dict[tuple[str, str, int], float] = {}
    found: dict[str, dict[str, Any]] = {}
    progress("runs", 0, len(cells))
    for cell, result in _results(config, cells):
        if "diverged" not in result and config.figure not in result["after"]:
            raise ConfigError(
                f"{cell.config.output} has no {config.figure}; each of its texts is a single token"
            )
        found[cell.name] = result
        progress("runs", len(found), len(cells), cell.name)
    rows: list[dict[str, Any]] = []
    for cell in cells:
        result = found[cell.name]
        rows.append({"row": cell.row, "column": cell.column, "seed": cell.seed} | result)
        figure = math.nan if "diverged" in result else result["after"][config.figure]
        figures[cell.row, cell.column, cell.seed] = figure
    atomic_write_text(config.output / "sweep.json", json.dumps(rows, indent=2) + "\n")
    return Sweep(config, figures)


def _results(config: SweepConfig, cells: Sequence[Cell]) -> Iterator[tuple[Cell, dict[str, Any]]]:
    """Each cell's, as they come."""
    result = partial(_result, texts=config.output / _TEXTS)
    if config.workers == 1:
        return ((cell, result(cell)) for cell in cells)
    return in_processes(
        result, cells, workers=config.workers, name=attrgetter("name"), failure=TrainingError
    )


def _result(cell: Cell, texts: Path) -> dict[str, Any]:
    """What a run came to; one that diverged would do so again, and is not begun anew."""
    run = RunDirectory(cell.config.output)
    # a schedule that is stretched when it has ended is not that of a run that was as long from the start
    check_run_directory(run, cell.config, resume=True, keep_budget=True)
    mark, digest = run.path / "diverged.json", config_hash(cell.config)
    known = json.loads(mark.read_text(encoding="utf-8")) if mark.exists() else {}
    if known.get("config_hash") == digest:
        return {"diverged": known["error"]}
    try:
        align(cell.config, resume=True, texts=texts)
        gc.collect()  # models that hold one another, before the next run's come
    except DivergedError as error:
        known = {"config_hash": digest, "error": str(error)}
        atomic_write_text(mark, json.dumps(known) + "\n")
        return {"diverged": known["error"]}
    result = run.read_result()
    assert result is not None, "a run that has ended has a result"
    return {key: result[key] for key in ("num_steps", "elapsed_s", "after")}


def cells_of(config: SweepConfig) -> Iterator[Cell]:
    """Every run, seed by seed."""
    for seed in config.seeds:
        for row, of_row in config.rows.items():
            for column, of_column in config.columns.items():
                output = config.output / row / column / f"seed-{seed}"
                values = _merged(_merged(config.base, of_column), of_row)
                values |= {"seed": seed, "output": str(output)}
                yield Cell(row, column, seed, validate(AlignConfig, values))


def _merged(values: Changes, changes: Changes) -> Changes:
    """Changes win, key by key of a section too, but for what is chosen as a whole: a kind, or a rule."""
    merged = dict(values)
    for key, new in changes.items():
        old = merged.get(key)
        if isinstance(old, dict) and isinstance(new, dict) and not _is_choice(old, new):
            new = _merged(old, new)
        merged[key] = new
    return merged


def _is_choice(old: Changes, new: Changes) -> bool:
    """Does the new one name what it is, whatever there was?"""
    return "kind" in new or isinstance(new.get("rule"), str) or ("rule" in new and "kind" in old)


def _check_figure(config: SweepConfig, cell: Cell) -> None:
    """Will this run have it?"""
    if not cell.config.data.evaluates:
        raise ConfigError(f"{cell.row}, {cell.column} has no data.held_out to be judged on")
    if config.figure.startswith("rule_") and cell.config.evaluation.rule is None:
        raise ConfigError(f"{config.figure} needs evaluation.rule in base")
