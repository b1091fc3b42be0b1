"""What runs again, in which order, and what other threads see meanwhile."""

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import UsageError
from paceline.studies.plan import PlannedStage
from paceline.studies.workflow import Workflow


def stage(folder: Path, name: str, *inputs: str, **config: Any) -> PlannedStage:
    """Writes `out/NAME/file`."""
    return PlannedStage(
        name=name,
        stage=name,
        look=0,
        command="draft",
        config=config,
        folder=folder / "out" / name,
        inputs=tuple(folder / text for text in inputs),
        outputs=(folder / "out" / name / "file",),
        covers=(),
        labels={},
        minutes_cpu=1.0,
        minutes_gpu=1.0,
        disk_mb=1.0,
    )


class Study:
    """Three stages: `last` reads what `first` writes, `other` reads its own input."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("a", "b"):
            (folder / name).write_text(name)
        self.stages = [
            stage(folder, "first", "a", steps=1),
            stage(folder, "last", "out/first/file"),
            stage(folder, "other", "b"),
        ]
        self.ran: list[str] = []
        self.events: list[tuple[str, str]] = []
        self.written: dict[str, str] = {}

    def execute(self, one: PlannedStage) -> bool:
        self.ran.append(one.name)
        one.folder.mkdir(parents=True, exist_ok=True)
        one.outputs[0].write_text(self.written.get(one.name, "same"))
        return True

    def workflow(self) -> Workflow:
        return Workflow(self.stages, self.folder / "doit.json")

    def run(self, execute: Callable[[PlannedStage], bool] | None = None, workers: int = 1) -> Any:
        self.ran.clear()
        self.events.clear()

        def listen(name: str, event: str) -> None:
            self.events.append((name, event))

        return self.workflow().run(execute or self.execute, listen, workers)


@pytest.fixture
def study(tmp_path: Path) -> Study:
    return Study(tmp_path)


def test_stages_run_after_those_whose_files_they_read(study: Study):
    study.stages.reverse()
    assert study.run() == []
    assert sorted(study.ran) == ["first", "last", "other"]
    assert study.ran.index("first") < study.ran.index("last")


def test_nothing_runs_again_if_nothing_changed(study: Study):
    assert study.workflow().done() == [False] * 3
    study.run()
    assert study.workflow().done() == [True] * 3
    assert study.run() == []
    assert study.ran == []
    assert study.events == [(name, "done") for name in ("first", "last", "other")]


def test_another_content_runs_the_stage_and_those_that_depend_on_it(study: Study):
    study.run()
    (study.folder / "a").write_text("A")
    study.written["first"] = "another"
    assert study.workflow().done() == [False, False, True]
    study.run()
    assert study.ran == ["first", "last"]


def test_a_stage_whose_inputs_are_made_again_as_they_were_is_left_alone(study: Study):
    study.run()
    (study.folder / "a").write_text("A")
    study.run()
    assert study.ran == ["first"]
    assert study.workflow().done() == [True] * 3


def test_a_new_date_of_the_same_content_runs_nothing(study: Study):
    study.run()
    (study.folder / "a").write_text("a")
    (study.folder / "out/first/file").touch()
    study.run()
    assert study.ran == []


def test_another_setting_runs_its_stage(study: Study):
    study.run()
    study.stages[0] = stage(study.folder, "first", "a", steps=2)
    assert study.workflow().done() == [False, False, True]
    study.run()
    assert study.ran == ["first"]


def test_an_output_that_is_gone_is_made_again(study: Study):
    study.run()
    (study.folder / "out/other/file").unlink()
    study.run()
    assert study.ran == ["other"]


def test_a_stage_that_fails_runs_again_and_the_others_do_not(study: Study):
    def fails(one: PlannedStage) -> bool:
        return study.execute(one) and one.name != "last"

    assert study.run(fails)
    assert study.ran == ["first", "last"]
    study.run()
    assert study.ran == ["last", "other"]


def test_what_a_stopped_study_had_finished_is_recorded(study: Study):
    def stops(one: PlannedStage) -> bool:
        if one.name == "last":
            raise KeyboardInterrupt
        return study.execute(one)

    with pytest.raises(KeyboardInterrupt):
        study.run(stops)
    assert study.workflow().done() == [True, False, False]


def test_a_stage_that_began_again_is_not_what_it_was_before(study: Study):
    """Killed while it runs with another setting, it has written over what the record knows."""
    study.run()
    before = study.stages[0]
    study.stages[0] = stage(study.folder, "first", "a", steps=2)
    found: list[list[bool]] = []

    def is_killed_later(one: PlannedStage) -> bool:
        done = study.execute(one)
        end = time.monotonic() + 20
        while time.monotonic() < end:
            now = Workflow([before, *study.stages[1:]], study.folder / "doit.json").done()
            if not now[0]:
                break
            time.sleep(0.01)
        found.append(now)
        return done

    study.run(is_killed_later)
    assert found[0] == [False, False, True]


def test_stages_that_run_together_leave_stdout_and_stderr_alone(study: Study):
    """Both begin before either ends, and the one that began first ends first."""
    streams = sys.stdout, sys.stderr
    both, first_ended = threading.Barrier(2, timeout=20), threading.Event()
    seen: list[Any] = []

    def execute(one: PlannedStage) -> bool:
        if one.name != "last":
            both.wait()
            seen.append((sys.stdout, sys.stderr))
            if one.name == "other":
                first_ended.wait(20)
        done = study.execute(one)
        if one.name == "first":
            threading.Timer(0.2, first_ended.set).start()
        return done

    assert study.run(execute, workers=2) == []
    assert seen == [streams] * 2
    assert (sys.stdout, sys.stderr) == streams


def test_a_damaged_record_is_one_line_that_says_what_to_do(study: Study):
    (study.folder / "doit.json").write_text("{torn")
    with pytest.raises(UsageError, match=r"doit\.json is not a record of stages; remove it"):
        study.workflow()
