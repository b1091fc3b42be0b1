"""Drafts of training runs: the initial one, the checkpoints, the final one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.config import StrictModel, read_json
from paceline.errors import UsageError
from paceline.models.loading import fingerprint
from paceline.records import RunDirectory
from paceline.train.checkpoint import saved_model

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_START = "start"


class Stop(StrictModel):
    """A draft at some step of a training run.

    Attributes:
        run: The run directory.
        label: `start`, `step N` or `end`.
        step: Number of optimizer steps of the run.
        elapsed_s: Seconds that the steps took.
        path: The model directory.
        fingerprint: Of the model's files; differs if the run is repeated.
    """

    run: Path
    label: str
    step: int
    elapsed_s: float
    path: Path
    fingerprint: str

    @property
    def is_start(self) -> bool:
        """Whether it is the initial draft."""
        return self.label == _START

    @property
    def identity(self) -> tuple[str, str, str]:
        """What tells it from other drafts, also of a run that was repeated in its place."""
        return str(self.run), self.label, self.fingerprint


def all_runs(paths: Iterable[Path]) -> list[Path]:
    """The runs themselves, and those of sweeps that did not diverge, in the order given.

    Raises:
        UsageError: a run is named twice.
    """
    found = [run for path in paths for run in _runs_of(path)]
    known: dict[Path, Path] = {}
    for run in found:
        place = run.resolve()
        if place in known:
            raise UsageError(f"{known[place]} and {run} are the same run; leave one out")
        known[place] = run
    return found


def short_names(runs: set[Path]) -> dict[Path, str]:
    """The directories without the parents that all of them share."""
    if len(runs) == 1:
        return {run: run.name for run in runs}
    shared = os.path.commonpath([run.absolute() for run in runs])
    return {run: run.absolute().relative_to(shared).as_posix() for run in runs}


def _runs_of(path: Path) -> list[Path]:
    if not (path / "sweep.json").exists():
        return [path]
    cells = read_json(path / "sweep.json")
    return [
        path / cell["row"] / cell["column"] / f"seed-{cell['seed']}"
        for cell in cells
        if "diverged" not in cell
    ]


def stops_of(path: Path) -> Iterator[Stop]:
    """The drafts of one run: the initial one, the checkpoints, the final one.

    Raises:
        UsageError: `path` is not a training run, or its initial draft has changed.
    """
    run = RunDirectory(path)
    manifest = run.read_manifest()
    if manifest is None:
        raise UsageError(
            f"{path} is not a run directory; give one from pretrain or align, or a finished sweep"
        )
    config = manifest["config"]
    start = config.get("draft") or config.get("model")
    initial = path / "start" if not isinstance(start, str) else Path(start)
    result = run.read_result()
    if start is None or (result is not None and "num_steps" not in result):
        raise UsageError(f"{path} is not a training run; give one from pretrain or align")

    def stop(label: str, step: int, elapsed_s: float, model: Path) -> Stop:
        return Stop(
            run=path,
            label=label,
            step=step,
            elapsed_s=elapsed_s,
            path=model,
            fingerprint=fingerprint(model),
        )

    first = stop(_START, 0, 0.0, initial)
    inputs = manifest.get("inputs", {})
    if first.fingerprint != inputs.get("draft", inputs.get("model", first.fingerprint)):
        raise UsageError(
            f"the initial draft of {path} at {initial} has changed since the run; restore it, or "
            "leave the run out"
        )
    yield first
    last = result["num_steps"] if result is not None else -1
    for checkpoint in sorted(run.checkpoints.glob("step-*")):
        state = read_json(checkpoint / "state.json")
        if state["step"] != last:
            label = f"step {state['step']}"
            yield stop(label, state["step"], state["elapsed_s"], saved_model(checkpoint))
    if result is not None:
        final = path / ("draft" if "draft" in result else "model")
        yield stop("end", last, result["elapsed_s"], final)
