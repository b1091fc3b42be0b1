"""Stages as doit tasks.

doit compares the content of a stage's inputs and its configuration with those of its last
successful run. It is one package without dependencies, and its actions are Python callables. Of the
workflow libraries, doit and Snakemake were tried, and DVC was only installed: Snakemake installs 53
packages, DVC 96.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from doit.control import TaskControl
from doit.dependency import DatabaseException, Dependency, JsonDB
from doit.reporter import ZeroReporter
from doit.runner import MThreadRunner
from doit.task import Task
from doit.tools import config_changed

from paceline.config import read_json_mapping
from paceline.errors import ConfigError, UsageError
from paceline.records import atomic_write_text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline.studies.plan import PlannedStage


class _AtomicJson(JsonDB):
    """doit's record of successful stages; a killed process leaves the old or the new one."""

    def dump(self) -> None:
        atomic_write_text(Path(self.name), self.codec.encode(self._db))


class _Reporter(ZeroReporter):
    """Saves the record after each stage, and tells `listen` what happens to it."""

    def __init__(self, record: Dependency, listen: Callable[[str, str], None]) -> None:
        self._record = record
        self._listen = listen
        self.problems: list[str] = []

    def execute_task(self, task: Task) -> None:
        # the earlier success is gone as soon as this run writes, however it ends
        self._record.remove_success(task)
        self._record.backend.dump()
        self._listen(task.name, "started")

    def skip_uptodate(self, task: Task) -> None:
        self._listen(task.name, "done")

    def add_success(self, task: Task) -> None:
        self._record.backend.dump()
        self._listen(task.name, "done")

    def add_failure(self, task: Task, fail: Any) -> None:
        self.problems.append(" ".join(str(fail.get_msg()).split()))

    def runtime_error(self, msg: str) -> None:
        self.problems.append(" ".join(msg.split()))


class Workflow:
    """The stages of a study, and the record of those that have run."""

    def __init__(self, stages: Sequence[PlannedStage], file: Path) -> None:
        """`file`: the record; raises UsageError if it cannot be read."""
        self._stages = list(stages)
        try:
            known = read_json_mapping(file) if file.exists() else {}
            if not all(isinstance(stage, dict) for stage in known.values()):
                raise ConfigError(file)
            self._record = Dependency(_AtomicJson, str(file))
        except (DatabaseException, OSError, ConfigError):
            raise UsageError(
                f"{file} is not a record of stages; remove it: all stages then start again, and "
                "resume what they have written"
            ) from None

    def run(
        self,
        execute: Callable[[PlannedStage], bool],
        listen: Callable[[str, str], None],
        workers: int,
    ) -> list[str]:
        """Run what is not up to date, in threads. -> doit's messages about stages that failed.

        Args:
            execute: Runs one stage, and returns whether it succeeded.
            listen: Gets a stage's name, and `started` or `done`.
            workers: Number of stages that run at the same time.
        """
        tasks = [_task(stage, execute) for stage in self._stages]
        control = TaskControl(tasks)
        control.process([task.name for task in tasks])
        reporter = _Reporter(self._record, listen)
        runner = MThreadRunner(self._record, reporter, num_process=workers)
        runner.run_all(control.task_dispatcher())
        return reporter.problems

    def done(self) -> list[bool]:
        """Whether each stage is up to date, and so is each stage that it depends on."""
        tasks = {stage.name: _task(stage, lambda _: True) for stage in self._stages}
        stale: set[Path] = set()
        found: list[bool] = []
        for stage in self._stages:
            done = not stale.intersection(stage.inputs)
            done = done and self._record.get_status(tasks[stage.name], tasks).status == "up-to-date"
            if not done:
                stale |= set(stage.outputs)
            found.append(done)
        return found


def _task(stage: PlannedStage, execute: Callable[[PlannedStage], bool]) -> Task:
    def action() -> bool:
        return execute(stage)

    return Task(
        stage.name,
        [action],
        file_dep=[str(path) for path in stage.inputs],
        targets=[str(path) for path in stage.outputs],
        uptodate=[config_changed({"command": stage.command, "config": stage.config})],
        # doit would replace this process's stdout and stderr, and threads would not restore them
        io={"capture": False},
        verbosity=0,
    )
