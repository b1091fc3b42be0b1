"""One stage: what is moved away, what is resumed, and what a failure says."""

import fcntl
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.errors import StorageError, StudyError
from paceline.studies import execute as module
from paceline.studies.execute import LocalRunner, StageFolder, execute, last_line
from paceline.studies.plan import PlannedStage


class Recorded:
    """A runner that writes the outputs instead of running a command."""

    def __init__(self, *outputs: Path, code: int = 0, says: str = "") -> None:
        self.outputs, self.code, self.says = outputs, code, says
        self.commands: list[list[str]] = []

    def __call__(self, command: Sequence[str], log: Path) -> int:
        self.commands.append(list(command))
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a") as stream:
            stream.write(self.says)
        for output in self.outputs:
            output.parent.mkdir(parents=True, exist_ok=True)
            output.write_text("new")
            (output.parent / "manifest.json").write_text('{"config": {}, "config_hash": "0"}')
        return self.code

    def stop(self) -> None:
        """Nothing runs."""


@pytest.fixture
def planned(tmp_path: Path) -> Callable[..., PlannedStage]:
    """A stage that reads `in` and writes `study/run/file`."""
    (tmp_path / "in").write_text("text")

    def make(command: Any = "align", **config: Any) -> PlannedStage:
        folder = tmp_path / "study/run"
        return PlannedStage(
            "stage", command, config, folder, (tmp_path / "in",), (folder / "file",),
            (), {}, 1.0, 1.0, 1.0,
        )  # fmt: skip

    return make


@pytest.fixture
def folder(tmp_path: Path) -> StageFolder:
    return StageFolder(tmp_path / "study")


def test_a_stage_has_its_configuration_in_a_file_and_resumes_what_it_began(
    planned: Callable[..., PlannedStage], folder: StageFolder
):
    stage = planned(num_steps=3, data={"train": "x"})
    run = Recorded(*stage.outputs)
    for _ in range(2):
        execute(stage, folder, run)
    file = folder.output / "stages/stage.yaml"
    assert run.commands == [
        ["align", "--config", str(file)],
        ["align", "--config", str(file), "--resume"],
    ]
    assert yaml.safe_load(file.read_text()) == {"num_steps": 3, "data": {"train": "x"}}
    assert not (folder.output / "replaced").exists()


def test_commands_that_resume_by_themselves_get_no_option(
    planned: Callable[..., PlannedStage], folder: StageFolder
):
    stage = planned("bench")
    run = Recorded(*stage.outputs)
    for _ in range(2):
        execute(stage, folder, run)
    assert "--resume" not in run.commands[1]


@pytest.mark.parametrize("changed", ["configuration", "input", "mark"])
def test_outputs_of_something_else_are_moved_away_and_kept(
    planned: Callable[..., PlannedStage], folder: StageFolder, tmp_path: Path, changed: str
):
    stage = planned(num_steps=3)
    run = Recorded(*stage.outputs)
    execute(stage, folder, run)
    for number in range(2):
        stage.outputs[0].write_text(f"old {number}")
        if changed == "configuration":
            stage = planned(num_steps=4 + number)
        elif changed == "input":
            (tmp_path / "in").write_text(f"another text {number}")
        else:  # made by another program, or before studies
            folder.mark(stage).unlink()
        execute(stage, folder, run)
    kept = sorted(path.read_text() for path in (folder.output / "replaced").glob("*/run/file"))
    assert kept == ["old 0", "old 1"]
    assert "--resume" not in run.commands[-1]


@pytest.mark.parametrize("mark", [None, "other stage"])
def test_a_directory_that_no_stage_has_written_stays_where_it_is(
    planned: Callable[..., PlannedStage], folder: StageFolder, mark: str | None
):
    stage = planned()
    stage.folder.mkdir(parents=True)
    (stage.folder / "letter").write_text("precious")
    if mark is not None:  # of a stage of this name with another directory
        folder.mark(stage).parent.mkdir()
        folder.mark(stage).write_text('{"digest": "0", "folder": "other"}')
    with pytest.raises(StudyError, match=r"is there already and holds no run; move it, or set"):
        execute(stage, folder, Recorded(*stage.outputs))
    assert (stage.folder / "letter").read_text() == "precious"
    assert not (folder.output / "replaced").exists()
    (stage.folder / "letter").unlink()
    execute(stage, folder, Recorded(*stage.outputs))


@pytest.mark.parametrize(
    ("code", "said", "reason"),
    [
        (2, "loading\npaceline: no such file x\n", "no such file x"),
        (2, "paceline: no such file x\nleaked semaphore objects\n\n", "no such file x"),
        (3, "paceline: warning: slow\nSegmentation fault\n", "Segmentation fault"),
        (3, "", "exit code 3"),
        (-9, "drafts 30%\n", r"its process was ended by SIGKILL \(memory\?\)"),
        (-15, "drafts 30%\n", "its process was ended by SIGTERM"),
    ],
)
def test_a_failure_is_one_line_with_the_commands_message(
    planned: Callable[..., PlannedStage], folder: StageFolder, code: int, said: str, reason: str
):
    folder.log(planned()).parent.mkdir(parents=True)
    folder.log(planned()).write_text("paceline: an error of yesterday\n")
    line = rf"^stage stage failed: {reason}; finished stages are kept: .* \(log: .*stage\.log\)$"
    with pytest.raises(StudyError, match=line):
        execute(planned(), folder, Recorded(code=code, says=said))


def test_an_output_that_is_not_written_is_named(
    planned: Callable[..., PlannedStage], folder: StageFolder
):
    with pytest.raises(StudyError, match=r"stage stage ended without writing .*run/file; correct"):
        execute(planned(), folder, Recorded())


def test_the_last_line_of_a_long_log_is_found(tmp_path: Path):
    log = tmp_path / "log"
    log.write_text("paceline: early\n" + "x" * 5_000 + "\n  the end  \n\n")
    assert last_line(log) == "the end"
    log.write_text("")
    assert last_line(log) == ""


def test_a_disk_that_is_full_is_said_before_the_command_runs(
    planned: Callable[..., PlannedStage], folder: StageFolder, tmp_path: Path
):
    (tmp_path / "study").write_text("a file")
    with pytest.raises(StorageError, match="could not write"):
        execute(planned(), folder, Recorded())


def program(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Run this instead of a Paceline command, with the same care for the parent's end."""
    start = "import sys, time; from paceline.processes import end_with_parent\n"
    begin = "end_with_parent(int(sys.argv.pop(1)))\n"
    monkeypatch.setattr(module, "_PROGRAM", start + begin + textwrap.dedent(text))


def test_a_command_writes_to_its_log_and_its_exit_code_is_returned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    program(monkeypatch, "print(sys.argv[1:]); print('wrong', file=sys.stderr); sys.exit(7)")
    log = tmp_path / "logs/x.log"
    assert [LocalRunner()(["align", "-x"], log) for _ in range(2)] == [7, 7]
    assert log.read_text().count("['align', '-x']\n") == 2
    assert log.read_text().count("wrong\n") == 2


@pytest.mark.parametrize(("workers", "threads"), [(1, None), (2, 3), (4, 1), (9, 1)])
def test_commands_at_the_same_time_share_the_threads(
    workers: int, threads: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("torch.get_num_threads", lambda: 6)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    program(monkeypatch, "import os; print(os.environ.get('OMP_NUM_THREADS'))")
    LocalRunner(workers)([], tmp_path / "log")
    assert (tmp_path / "log").read_text() == f"{threads}\n"


@pytest.mark.slow
def test_stopping_ends_a_command_with_its_workers_and_starts_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The workers of a sweep are processes of its group; this one ignores the end of its pipe."""
    program(
        monkeypatch,
        """
        import subprocess
        sleeping = [sys.executable, '-c', 'import time; print("up", flush=True); time.sleep(600)']
        subprocess.Popen(sleeping).wait()
        """,
    )
    runner, log, codes = LocalRunner(), tmp_path / "x.log", []
    thread = threading.Thread(target=lambda: codes.append(runner([], log)))
    thread.start()
    while not log.exists() or "up" not in log.read_text():
        time.sleep(0.02)
    runner.stop()
    thread.join()
    assert codes == [-signal.SIGTERM]
    with log.open("ab") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)  # waits for the last process that holds it
    with pytest.raises(StudyError, match="the study was stopped"):
        runner([], log)


@pytest.mark.slow
def test_a_stage_waits_for_what_a_killed_study_left(
    planned: Callable[..., PlannedStage], folder: StageFolder, monkeypatch: pytest.MonkeyPatch
):
    """A process that keeps the log open with its lock stands for a run that saves its state."""
    log = folder.log(planned())
    log.parent.mkdir(parents=True)
    script = "import fcntl, sys; fcntl.flock(1, fcntl.LOCK_EX); print('up', flush=True); input()"
    with log.open("ab") as stream:
        left = subprocess.Popen(
            [sys.executable, "-c", script], stdout=stream, stdin=subprocess.PIPE
        )
    while "up" not in log.read_text():
        time.sleep(0.02)
    assert left.stdin is not None
    stage = planned()
    monkeypatch.setattr(module, "_EARLIER_S", 0.0)
    with pytest.raises(StudyError, match="stage stage is still running for an earlier study"):
        execute(stage, folder, Recorded(*stage.outputs))
    monkeypatch.setattr(module, "_EARLIER_S", 60.0)
    threading.Timer(0.3, left.stdin.close).start()
    execute(stage, folder, Recorded(*stage.outputs))
    assert left.wait() != 0, "input() ends with its pipe"


def test_a_process_whose_parent_is_gone_ends_at_once():
    for parent, ended in ((1, (-signal.SIGTERM, "")), (os.getpid(), (0, "on\n"))):
        script = "from paceline.processes import end_with_parent as end; "
        command = [sys.executable, "-c", f"{script}end({parent}); print('on')"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == ended
