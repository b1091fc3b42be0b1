"""Trackers get what metrics.jsonl has, also if the run is killed and resumed."""

import itertools
import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from accelerate.tracking import GeneralTracker

from paceline.errors import UsageError
from paceline.records import read_jsonl
from paceline.results.figures import FIGURES
from paceline.train import AlignConfig, align, pretrain, tracking
from paceline.train.step import Stepper
from support.configs import small
from support.runs import align_config, held_out

Points = dict[str, list[tuple[int, Any]]]
"""Steps and values of each curve."""
MEASURED = {"tokens_per_s", "elapsed_s"}
"""Steps that are trained again take another time."""


class Recorder(GeneralTracker):
    """A tracker that keeps what it gets."""

    name = "recorder"
    requires_logging_directory = False

    def __init__(self, *, fails_at: int | None = None) -> None:
        super().__init__()
        self.fails_at = fails_at
        self.configurations: list[dict[str, Any]] = []
        self.points: Points = {}
        self.num_finished = 0

    @property
    def tracker(self) -> None:
        return None

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.configurations.append(values)

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        assert step is not None
        if self.fails_at is not None and step >= self.fails_at:
            raise OSError("no route to host\nand more")
        for name, value in values.items():
            self.points.setdefault(name, []).append((step, value))

    def finish(self) -> None:
        self.num_finished += 1


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    found = Recorder()
    monkeypatch.setattr(tracking, "find_spec", lambda _: True)
    known = "accelerate.accelerator.filter_trackers"
    monkeypatch.setattr(known, lambda names, *_: [found] if names else [])
    return found


def config(folder: Path, output: Path, track: str = "wandb", **changes: Any) -> AlignConfig:
    evaluated = held_out(folder, every_steps=4)
    saved = {"every_steps": 4, "every_seconds": None}
    settings = {"track": [track], "checkpoints": saved, **evaluated}
    return align_config(folder, output, **(settings | changes))


def in_metrics(run: Path) -> Points:
    """The curves of metrics.jsonl, and the last point of an evaluation from result.json."""
    points: Points = {}
    rows = read_jsonl(run / "metrics.jsonl")
    if (run / "result.json").exists():
        after = json.loads((run / "result.json").read_text())["after"]
        rows = [*rows, {"step": rows[-1]["step"], "evaluation": after}]
    for row in rows:
        evaluation = row.get("evaluation") or {}
        values = row | {f"evaluation/{name}": value for name, value in evaluation.items()}
        for name in values.keys() - {"step", "evaluation"}:
            points.setdefault(name, []).append((row["step"], values[name]))
    return points


@pytest.mark.slow
def test_a_tracker_gets_every_metric_of_a_run_and_of_a_resumed_one(
    folder: Path, tmp_path: Path, recorder: Recorder
):
    run = config(folder, tmp_path / "run")
    whole, steps = Stepper.step, itertools.count(1)

    def dies(*arguments: Any) -> Any:
        if next(steps) == 7:
            raise MemoryError
        return whole(*arguments)

    with patch.object(Stepper, "step", dies), pytest.raises(MemoryError):
        align(run)  # steps 5 and 6 are after the checkpoint
    assert [step for step, _ in recorder.points["loss"]] == [1, 2, 3, 4, 5, 6]
    align(run, resume=True)
    assert [step for step, _ in recorder.points["loss"]] == [*range(1, 7), *range(5, 11)]
    expected = in_metrics(tmp_path / "run")
    for name in expected.keys() - MEASURED:
        assert dict(recorder.points[name]) == dict(expected[name]), name
    assert recorder.points.keys() == expected.keys()
    assert recorder.num_finished == 2
    kept = recorder.configurations[0]
    assert kept["optimizer/learning_rate"] == 3e-3
    assert kept["data/train/path"] == str(folder / "corpus.jsonl")


@pytest.mark.slow
def test_pretraining_is_tracked_with_the_names_of_the_registry(
    folder: Path, tmp_path: Path, recorder: Recorder
):
    data = {"train": str(folder / "corpus.jsonl"), "held_out": str(folder / "corpus.jsonl")}
    changes = {"num_steps": 2, "track": ["trackio"], "model": str(folder / "draft"), "data": data}
    pretrain(small("pretrain", folder, tmp_path / "run", **changes))
    assert recorder.points.keys() == in_metrics(tmp_path / "run").keys()
    evaluated = {name.removeprefix("evaluation/") for name in recorder.points if "/" in name}
    assert {"loss", "accuracy"} <= evaluated & FIGURES.keys()


@pytest.mark.slow
def test_a_tracker_that_fails_does_not_end_the_run(
    folder: Path, tmp_path: Path, recorder: Recorder
):
    recorder.fails_at = 3
    with pytest.warns(UserWarning, match=r"a tracker failed \(no route to host\); track gets"):
        align(config(folder, tmp_path / "run", num_steps=4))
    assert [step for step, _ in recorder.points["loss"]] == [1, 2]
    assert len(in_metrics(tmp_path / "run")["loss"]) == 4


def test_a_tracker_that_does_not_start_is_said_in_one_line_before_the_models_are_loaded(
    folder: Path, tmp_path: Path, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
):
    def no_key(*_: Any) -> None:
        raise ValueError("api_key not configured\nuse login")

    monkeypatch.setattr(recorder, "start", no_key)
    monkeypatch.setattr("paceline.train.run.load_model", None)
    with pytest.raises(UsageError, match=r"did not start \(api_key not configured\); corr"):
        align(config(folder, tmp_path / "run"))


def test_a_tracker_that_is_not_installed_is_refused_before_any_work(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tracking, "find_spec", lambda _: None)
    with pytest.raises(UsageError, match="mlflow, which is not installed: pip install mlflow"):
        align(config(folder, tmp_path / "run", track="mlflow"))
    assert not (tmp_path / "run").exists()
