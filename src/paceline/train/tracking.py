"""Sends the metrics of a run to experiment trackers, by accelerate.

A tracker gets each line of metrics.jsonl: `loss`, `learning_rate` and so on at a step, and the
figures of an evaluation as `evaluation/expected_acceptance`. The names are those of the registry of
figures. At the end it gets the evaluation of the saved model, which is `after` in result.json.
"""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

from paceline.errors import UsageError, first_line
from paceline.records import flattened

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from accelerate import Accelerator

TrackerName = Literal["tensorboard", "wandb", "trackio", "mlflow"]


def check_trackers(names: Sequence[TrackerName]) -> None:
    """Raise UsageError if the package of a tracker, which has its name, is not installed."""
    for name in names:
        if find_spec(name) is None:
            raise UsageError(f"track names {name}, which is not installed: pip install {name}")


def start_trackers(accelerator: Accelerator, run: Path, config: Mapping[str, Any]) -> None:
    """Start the trackers that the accelerator was made with, for the run in this directory."""
    project = os.environ.get("WANDB_PROJECT", "paceline")
    settings = {
        "wandb": {"name": run.name, "dir": str(run)},
        "trackio": {"name": run.name},
        "mlflow": {"run_name": run.name},
    }
    try:
        # standard output is the result of a command, and trackers print their greetings there
        with contextlib.redirect_stdout(sys.stderr):
            accelerator.init_trackers(project, _plain(config), settings)
    except Exception as error:
        names = ", ".join(map(str, accelerator.log_with))
        raise UsageError(
            f"track {names} did not start ({first_line(error)}); correct its settings, or "
            "remove it from track"
        ) from error


def track(accelerator: Accelerator, row: Mapping[str, Any]) -> None:
    """Send a line of metrics.jsonl. If a tracker fails, none gets more, with a warning."""
    values = _plain({name: value for name, value in row.items() if name != "step"})
    try:
        accelerator.log(values, step=row["step"])
    except Exception as error:
        accelerator.trackers = []
        warnings.warn(
            f"a tracker failed ({first_line(error)}); track gets no more metrics, and "
            "metrics.jsonl has all",
            stacklevel=2,
        )


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Nested values by joined names, as numbers, texts and truth values."""
    return {
        name: value if value is None or isinstance(value, bool | int | float | str) else str(value)
        for name, value in flattened(values, between="/").items()
    }
