"""Checks of tasks and engine costs that several configurations share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.measure.engine_costs import read_costs
from paceline.tasks import Code
from paceline.tasks.base import examples_of
from paceline.tasks.row_task import RowTask

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.data.input_checks import InputChecks
    from paceline.measure.engine_costs import WithCosts
    from paceline.tasks import Task


def check_task(checks: InputChecks, name: str, task: Task, count: int, seed: int) -> None:
    """Check the texts of a task, that it has `count` examples, and its scoring library."""
    task.versions()
    texts = ("corpus", "train_corpus")
    if isinstance(task, RowTask | Code):  # read columns that other commands do not accept
        texts = ()
    for key in texts:
        if (text := getattr(task, key, None)) is not None:
            checks.text(f"{name}.{key}", text)
    examples_of(task, "test", count, seed)


def check_costs(checks: InputChecks, config: WithCosts, gammas: Sequence[int]) -> None:
    """Check that the costs of an engine, if there are any, cover the block lengths.

    Raises:
        UsageError: they do not, or the file cannot be used.
    """
    if config.costs is not None:
        costs = read_costs(config.costs)
        costs.usable(gammas, config.concurrency)
        checks.lines.append(f"costs: {config.costs}, of {costs}")
