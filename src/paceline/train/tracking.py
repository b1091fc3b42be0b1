"""Sends the metrics of a run to experiment trackers, with the classes of accelerate.

A tracker gets each line of metrics.jsonl: `loss`, `learning_rate` and so on at a step, and the
figures of an evaluation as `evaluation/expected_acceptance`. The names are those of the registry of
figures. At the end it gets the evaluation of the saved model, which is `after` in result.json.

A killed run trains the steps since its checkpoint again. TensorBoard hides what it had of them
(`purge_step`). Other trackers keep what they have, so these lines are not sent again. What such a
tracker had not sent when the process was killed is missing there; metrics.jsonl has it.
"""

from __future__ import annotations

import contextlib
import os
import sys
import uuid
import warnings
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

from accelerate import tracking

from paceline.errors import UsageError, first_line
from paceline.records import read_jsonl

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from accelerate.tracking import GeneralTracker

    from paceline.records import RunDirectory

TrackerName = Literal["tensorboard", "wandb", "trackio", "mlflow"]
_PROJECT = "paceline"


def check_trackers(names: Sequence[TrackerName]) -> None:
    """Raise UsageError if the package of a tracker, which has its name, is not installed."""
    for name in names:
        if find_spec(name) is None:
            raise UsageError(f"track names {name}, which is not installed: pip install {name}")


class Tracking:
    """The trackers of one run, in its main process.

    A tracker that fails gets no more metrics, with a warning; the run goes on.
    """

    def __init__(
        self,
        names: Sequence[TrackerName],
        directory: RunDirectory,
        config: Mapping[str, Any],
        kept: int,
    ) -> None:
        """Start the trackers. Call it before the metrics are rewound.

        Args:
            names: Of the trackers.
            directory: Of the run; its name is that of the run in a tracker.
            config: The run's configuration, which a tracker gets once.
            kept: The last step of which the metrics are kept; -1: none.

        Raises:
            UsageError: A tracker does not start.
        """
        sent = read_jsonl(directory.metrics) if names else []
        self._sent = {(row["step"], "evaluation" in row) for row in sent}
        self._trackers: dict[str, GeneralTracker] = {}
        for name in names:
            try:
                with _on_stderr():
                    self._trackers[name] = _started(name, directory, kept)
                    if not sent:
                        self._trackers[name].store_init_configuration(_flat(config))
            except Exception as error:
                self.finish()
                raise UsageError(
                    f"the tracker {name} did not start ({first_line(error)}); correct its "
                    "settings, or remove it from track"
                ) from error

    def log(self, row: Mapping[str, Any]) -> None:
        """Send a line of metrics.jsonl."""
        key = row["step"], "evaluation" in row
        values = _flat({name: value for name, value in row.items() if name != "step"})
        for name in list(self._trackers):
            if key not in self._sent or name == "tensorboard":
                self._try(name, lambda tracker: tracker.log(values, step=row["step"]))

    def finish(self) -> None:
        """Let the trackers send what they have kept back."""
        for name in list(self._trackers):
            self._try(name, lambda tracker: tracker.finish())

    def _try(self, name: str, call: Callable[[GeneralTracker], None]) -> None:
        try:
            with _on_stderr():
                call(self._trackers[name])
        except Exception as error:
            del self._trackers[name]
            warnings.warn(
                f"the tracker {name} failed ({first_line(error)}) and gets no more metrics; "
                "metrics.jsonl has all",
                stacklevel=3,
            )


def _on_stderr() -> contextlib.AbstractContextManager[object]:
    """Standard output is the result of a command, and trackers print their greetings there."""
    return contextlib.redirect_stdout(sys.stderr)


def _started(name: TrackerName, directory: RunDirectory, kept: int) -> GeneralTracker:
    """A tracker that continues the same curve if the run is resumed."""
    title = directory.path.resolve().name
    run_id = directory.keep_choice("tracked", lambda: {"id": uuid.uuid4().hex[:12]})["id"]
    match name:
        case "tensorboard":
            made = tracking.TensorBoardTracker(name, str(directory.path), purge_step=kept + 1)
        case "wandb":
            project, folder = os.environ.get("WANDB_PROJECT", _PROJECT), str(directory.path)
            named = {"name": title, "id": run_id, "resume": "allow", "dir": folder}
            made = tracking.WandBTracker(project, **named)
        case "trackio":
            project = os.environ.get("TRACKIO_PROJECT", _PROJECT)
            made = tracking.TrackioTracker(project, name=f"{title}-{run_id}", resume="allow")
        case "mlflow":
            return _started_mlflow(directory, title)
    made.start()
    return made


def _started_mlflow(directory: RunDirectory, title: str) -> tracking.MLflowTracker:
    """As `_started`; MLflow gives the run its id."""
    choices = (directory.read_manifest() or {}).get("choices", {})
    known = choices.get("mlflow", {}).get("id")
    made = tracking.MLflowTracker(_PROJECT, run_id=known, run_name=title)
    made.start()
    directory.keep_choice("mlflow", lambda: {"id": made.tracker.info.run_id})
    return made


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
