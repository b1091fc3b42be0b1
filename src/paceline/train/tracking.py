"""Sends the metrics of a run to experiment trackers, by accelerate.

A tracker gets each line of metrics.jsonl: `loss`, `learning_rate` and so on at a step, and the
figures of an evaluation as `evaluation/expected_acceptance`. The names are those of the registry of
figures. At the end it gets the evaluation of the saved model, which is `after` in result.json.

A killed run trains the steps since its checkpoint again. TensorBoard hides what it had of them
(`purge_step`); other trackers get these steps twice.
"""

from __future__ import annotations

import contextlib
import os
import sys
import uuid
import warnings
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

from paceline.errors import UsageError, first_line

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from accelerate import Accelerator

    from paceline.records import RunDirectory

TrackerName = Literal["tensorboard", "wandb", "trackio", "mlflow"]


def check_trackers(names: Sequence[TrackerName]) -> None:
    """Raise UsageError if the package of a tracker, which has its name, is not installed."""
    for name in names:
        if find_spec(name) is None:
            raise UsageError(f"track names {name}, which is not installed: pip install {name}")


class Tracking:
    """The trackers of one run, in its main process.

    If a tracker fails, none gets more metrics, with a warning; the run goes on.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        directory: RunDirectory,
        config: Mapping[str, Any],
        kept: int,
    ) -> None:
        """Start the trackers that the accelerator was made with.

        Args:
            accelerator: Of the run.
            directory: Of the run; its name is that of the run in a tracker.
            config: The run's configuration.
            kept: The last step of which the metrics are kept; -1: none.

        Raises:
            UsageError: A tracker does not start.
        """
        self._accelerator = accelerator
        if not accelerator.log_with:
            return
        path, project = directory.path.resolve(), os.environ.get("TRACKIO_PROJECT", "paceline")
        run_id = directory.keep_choice("tracked", lambda: {"id": uuid.uuid4().hex[:12]})["id"]
        settings = {
            "tensorboard": {"purge_step": kept + 1},
            "wandb": {"name": path.name, "id": run_id, "resume": "allow", "dir": str(path)},
            "trackio": {"name": f"{path.name}-{run_id}", "resume": "allow"},
            "mlflow": {"run_name": path.name},
        }
        project = os.environ.get("WANDB_PROJECT", project)
        try:
            with _on_stderr():
                accelerator.init_trackers(project, _flat(config), settings)
        except Exception as error:
            names = ", ".join(map(str, accelerator.log_with))
            raise UsageError(
                f"track {names} did not start ({first_line(error)}); correct its settings, or "
                "remove it from track"
            ) from error

    def log(self, row: Mapping[str, Any]) -> None:
        """Send a line of metrics.jsonl."""
        values = _flat({name: value for name, value in row.items() if name != "step"})
        self._try(lambda: self._accelerator.log(values, step=row["step"]))

    def finish(self) -> None:
        """Let the trackers send what they have kept back."""
        for tracker in self._accelerator.trackers:
            self._try(tracker.finish)

    def _try(self, call: Callable[[], object]) -> None:
        try:
            with _on_stderr():
                call()
        except Exception as error:
            self._accelerator.trackers = []
            warnings.warn(
                f"a tracker failed ({first_line(error)}); track gets no more metrics, and "
                "metrics.jsonl has all",
                stacklevel=3,
            )


def _on_stderr() -> contextlib.AbstractContextManager[object]:
    """Standard output is the result of a command, and trackers print their greetings there."""
    return contextlib.redirect_stdout(sys.stderr)


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested values by joined names, as numbers, texts and truth values."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}/")
        else:
            plain = value is None or isinstance(value, bool | int | float | str)
            flat[f"{prefix}{name}"] = value if plain else str(value)
    return flat
