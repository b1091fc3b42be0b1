"""Saves and restores checkpoints, and checks whether a run can be resumed.

A checkpoint is a directory such as `step-00000100` with `model/` (a float32 model directory),
`optimizer.pt` and `state.json`. No generator state is saved: all generators are keyed by the
number of examples drawn, which is in `state.json`.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from paceline.config import read_json
from paceline.models.drafts.save import save_draft, tokenizer_files
from paceline.records import atomic_directory, atomic_write_text, read_jsonl, storage_errors
from paceline.train.lora import ADAPTER, merged, save_adapter

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from paceline.config import StrictModel
    from paceline.models.hf.base import HfModel
    from paceline.records import RunDirectory
    from paceline.train.lora import Lora

# keys that a resumed run may change
_MAY_CHANGE = {"output", "num_steps", "max_seconds", "max_loss_ratio", "checkpoints"}
_MAY_CHANGE |= {"chunk_tokens", "track"}
_MODEL = "model"  # directory of the model in a checkpoint


@dataclass
class TrainingState:
    """The resumable state of a run."""

    step: int = 0
    elapsed_s: float = 0.0
    num_drawn: int = 0  # state of the text source
    time_position: float = 0.0  # of a time-based schedule; see `TrainingLoop`
    recent_losses: list[float] = field(default_factory=list)  # for the loss guard
    phase: int = 0  # of `recent_losses`; see `StepPlan`


class Adapter(NamedTuple):
    """The adapter that a run trains, of a draft at a path."""

    lora: Lora
    base: str


class CheckpointStore:
    """The checkpoints of one run.

    Attributes:
        adapter: What is trained in place of the weights; None: the weights.
    """

    adapter: Adapter | None = None

    def __init__(self, directory: Path, tokenizer_source: Path, keep: int) -> None:
        self.directory = directory
        self.tokenizer_source = tokenizer_source
        tokenizer_files(tokenizer_source)  # an error now instead of when a model is saved
        self.keep = keep

    def all(self) -> list[Path]:
        """All complete checkpoints, oldest first."""
        return sorted(self.directory.glob("step-*"))

    def latest(self) -> Path | None:
        """The newest checkpoint, or None."""
        return max(self.directory.glob("step-*"), default=None)

    def save(self, model: HfModel, optimizer: dict[str, Any], state: TrainingState) -> Path:
        """Write a checkpoint atomically, then delete the oldest ones beyond `keep`."""
        path = self.directory / f"step-{state.step:08d}"
        with atomic_directory(path) as scratch:
            self.save_model(model, scratch / _MODEL)
            self.save_adapter(model, scratch)
            _save_optimizer(optimizer, scratch / "optimizer.pt")
            content = json.dumps(dataclasses.asdict(state))
            (scratch / "state.json").write_text(content + "\n", encoding="utf-8")
        with storage_errors(self.directory):
            for old in self.all()[: -self.keep]:
                # renamed first, so that an interrupted deletion leaves no partial checkpoint
                shutil.rmtree(old.rename(old.with_name(f".{old.name}")))
        return path

    def save_model(self, model: HfModel, path: Path, dtype: torch.dtype | None = None) -> None:
        """Write a model as a draft; with its adapter in its weights, if it has one."""
        save_draft(merged(model), self.tokenizer_source, path, dtype)

    def save_adapter(self, model: HfModel, folder: Path) -> None:
        """Write the adapter into a folder, if there is one."""
        if self.adapter is not None:
            save_adapter(model, *self.adapter, folder / ADAPTER)

    def sweep(self) -> None:
        """Remove incomplete checkpoints of a killed run."""
        for scratch in self.directory.glob(".step-*"):
            shutil.rmtree(scratch)


def _save_optimizer(optimizer: dict[str, Any], path: Path) -> None:
    with path.open("wb") as stream:
        try:
            torch.save(optimizer, stream)
        except RuntimeError as error:
            # torch replaces the error of a full disk by its own error about the archive
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


def saved_model(checkpoint: Path) -> Path:
    return checkpoint / _MODEL


def read_state(checkpoint: Path | None) -> TrainingState:
    """The state in a checkpoint, or the initial state without one."""
    if checkpoint is None:
        return TrainingState()
    return TrainingState(**read_json(checkpoint / "state.json"))


def read_optimizer(checkpoint: Path) -> dict[str, Any]:
    """The optimizer's state in a checkpoint."""
    # each process and machine moves it to its own device
    return torch.load(checkpoint / "optimizer.pt", map_location="cpu", weights_only=True)


def has_begun(run: RunDirectory) -> bool:
    """True if the run directory has metrics, a result or checkpoints."""
    rows = run.metrics.exists() and run.metrics.stat().st_size > 0
    return rows or run.result.exists() or any(run.checkpoints.glob("step-*"))


def check_run_directory(
    run: RunDirectory,
    config: StrictModel,
    inputs: Mapping[str, str] | None = None,
    *,
    resume: bool,
) -> dict[str, str]:
    """Check that the run may write to its directory. -> the fingerprints of its inputs.

    `inputs` are the current fingerprints.
    """
    before = run.check(
        config, begun=has_begun(run), resume=resume, may_change=_MAY_CHANGE, inputs=inputs
    )
    known = {} if before is None else before.get("inputs", {})
    return known | {name: mark for name, mark in (inputs or {}).items() if mark}


def clear_set_up(run: RunDirectory) -> None:
    """Delete files of a failed set-up, which may belong to another configuration."""
    shutil.rmtree(run.path / "start", ignore_errors=True)
    for name in ("held_out.jsonl", "packing.jsonl"):
        (run.path / name).unlink(missing_ok=True)


def rewind_metrics(run: RunDirectory, step: int) -> None:
    """Delete the metrics of steps after `step`, which will run again."""
    rows = [row for row in read_jsonl(run.metrics) if row["step"] <= step]
    atomic_write_text(run.metrics, "".join(json.dumps(row) + "\n" for row in rows))
