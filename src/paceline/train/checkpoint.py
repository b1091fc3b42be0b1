"""The state of training on disk: whole checkpoints only, and runs that go on where they stopped.

A checkpoint is a directory `step-00000100` with `draft/` (an ordinary model directory, float32),
`optimizer.pt` and `state.json`. There is no state of random generators to save: every draw is made
from a generator named after the number of examples drawn, which `state.json` holds.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from paceline.models.drafts.save import save_draft
from paceline.records import atomic_directory, atomic_write_text, read_jsonl

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from paceline.models.hf.causal import CausalModel
    from paceline.records import RunDirectory
    from paceline.train.settings import TrainSettings

# A run may be given more time or another place, and be watched differently, when it goes on.
_MAY_CHANGE = {"output", "max_loss_ratio", "checkpoints"}
_BUDGET = {"num_steps", "max_seconds"}


@dataclass
class TrainingState:
    """Where training is.

    Attributes:
        num_drawn: The state of the text source.
        time_position: How far the schedule is by the clock; see `TrainingLoop`.
        recent_losses: What the loss guard compares with.
        phase: Of the run that `recent_losses` are from; see `StepPlan`.
        writing_s: How long a round of the target's text takes to write; see `WritingClock`.
    """

    step: int = 0
    elapsed_s: float = 0.0
    num_drawn: int = 0
    time_position: float = 0.0
    recent_losses: list[float] = field(default_factory=list)
    phase: int = 0
    writing_s: float = 0.0


class CheckpointStore:
    """The checkpoints of one run."""

    def __init__(self, directory: Path, tokenizer_source: Path, keep: int) -> None:
        self.directory = directory
        self.tokenizer_source = tokenizer_source
        self.keep = keep

    def all(self) -> list[Path]:
        """Every whole checkpoint, oldest first."""
        return sorted(self.directory.glob("step-*"))

    def latest(self) -> Path | None:
        """The newest one, if any."""
        return next(reversed(self.all()), None)

    def save(self, draft: CausalModel, optimizer: dict[str, Any], state: TrainingState) -> Path:
        """Write a checkpoint whole, then drop the oldest ones beyond `keep`.

        `optimizer`: its state, in one piece.

        Raises:
            StorageError: it could not be written; earlier ones are as they were.
        """
        path = self.directory / f"step-{state.step:08d}"
        with atomic_directory(path) as scratch:
            save_draft(draft, self.tokenizer_source, scratch / "draft")
            _save_optimizer(optimizer, scratch / "optimizer.pt")
            content = json.dumps(dataclasses.asdict(state))
            (scratch / "state.json").write_text(content + "\n", encoding="utf-8")
        for old in self.all()[: -self.keep]:
            going = old.rename(old.with_name(f".{old.name}"))  # a kill leaves no half of one
            shutil.rmtree(going)
        return path

    def sweep(self) -> None:
        """Remove what a killed run left half-written."""
        for scratch in self.directory.glob(".step-*"):
            shutil.rmtree(scratch)


def _save_optimizer(optimizer: dict[str, Any], path: Path) -> None:
    with path.open("wb") as stream:
        try:
            torch.save(optimizer, stream)
        except RuntimeError as error:
            # A full disk is hidden behind torch's own complaint about the torn archive.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


def read_state(checkpoint: Path | None) -> TrainingState:
    """The state a run goes on from; without a checkpoint, its beginning."""
    if checkpoint is None:
        return TrainingState()
    return TrainingState(**json.loads((checkpoint / "state.json").read_text(encoding="utf-8")))


def read_optimizer(checkpoint: Path | None) -> dict[str, Any] | None:
    """The optimiser's state of a checkpoint."""
    if checkpoint is None:
        return None
    return torch.load(checkpoint / "optimizer.pt", weights_only=True)


def has_begun(run: RunDirectory) -> bool:
    """Is there anything of a run that a new start would lose?"""
    rows = run.metrics.exists() and run.metrics.stat().st_size > 0
    return rows or run.result.exists() or any(run.checkpoints.glob("step-*"))


def check_run_directory(
    run: RunDirectory,
    config: TrainSettings,
    inputs: Mapping[str, str] | None = None,
    *,
    resume: bool,
    keep_budget: bool = False,
) -> dict[str, str]:
    """May this run be written here, and with another budget? -> the fingerprints of its inputs.

    Raises:
        ConfigError: something else is there, or the same run with another configuration or inputs.
        StorageError: the place is a file.
    """
    may_change = _MAY_CHANGE if keep_budget else _MAY_CHANGE | _BUDGET
    before = run.check(
        config, begun=has_begun(run), resume=resume, may_change=may_change, inputs=inputs
    )
    known = {} if before is None else before.get("inputs", {})
    return known | {name: mark for name, mark in (inputs or {}).items() if mark}


def clear_set_up(run: RunDirectory) -> None:
    """Forget what a start prepared that then failed: another configuration may be tried now."""
    shutil.rmtree(run.path / "start", ignore_errors=True)
    for name in ("held_out.jsonl", "packing.jsonl"):
        (run.path / name).unlink(missing_ok=True)


def rewind_metrics(run: RunDirectory, step: int) -> None:
    """Drop the rows of steps that are to be made again."""
    rows = [row for row in read_jsonl(run.metrics) if row["step"] <= step]
    atomic_write_text(run.metrics, "".join(json.dumps(row) + "\n" for row in rows))
