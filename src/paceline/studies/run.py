"""Runs the stages of a study that are not up to date."""

from __future__ import annotations

import threading
import time
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from graphlib import TopologicalSorter
from typing import TYPE_CHECKING, NamedTuple

from paceline.config import read_json_mapping
from paceline.errors import ConfigError, UsageError
from paceline.progress import Progress, silent
from paceline.records import RunDirectory
from paceline.studies.execute import LocalRunner, RayRunner, StageFolder, execute
from paceline.studies.plan import PlannedStage, plan
from paceline.studies.study_file import SCALES

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path
    from types import TracebackType

    from paceline.studies.execute import Runner
    from paceline.studies.study_file import Scale, StudyConfig

_TICK_S = 1.0


class StageState(NamedTuple):
    """A stage, and whether it has run with its present inputs and configuration."""

    stage: PlannedStage
    is_done: bool


def run_study(
    study: StudyConfig,
    scale: Scale = "cpu",
    progress: Progress = silent,
    runner: Runner | None = None,
) -> list[PlannedStage]:
    """Run the stages that are not up to date. -> all stages.

    Args:
        study: The study.
        scale: Its size.
        progress: Gets the expected minutes of finished stages.
        runner: Runs commands; None: as `study.runner` says.

    Raises:
        UsageError: an input is missing, or the output holds other files.
        StudyError: a stage failed; finished stages are kept.
    """
    stages = plan(study, scale)
    check_inputs(study, stages)
    with RunDirectory(study.output).alone():
        _refuse_other_files(study.output)
        runner = runner or (RayRunner() if study.runner == "ray" else LocalRunner(study.workers))
        try:
            _run(study, stages, runner, progress)
        finally:
            runner.stop()
    return stages


def _refuse_other_files(output: Path) -> None:
    """Raise a ConfigError unless the directory is empty or has marks of a study's stages."""
    for path in output.glob("stages/*.json"):
        with suppress(ConfigError):
            if "digest" in read_json_mapping(path):
                return
    ours = {name for name in SCALES if (output / name / "stages").is_dir()}
    if not any(output.glob("stages/[!.]*")):  # of a study that was stopped at its first mark
        ours.add("stages")
    there = [p for p in output.iterdir() if not p.name.startswith(".") and p.name not in ours]
    if there:
        raise ConfigError(
            f"output {output} holds {min(there).name} and no stage of a study; choose another "
            "output"
        )


def states(study: StudyConfig, scale: Scale = "cpu") -> list[StageState]:
    """All stages; one that reads the output of an outdated stage is outdated too."""
    stale: set[Path] = set()
    folder = StageFolder(study.output)
    found: list[StageState] = []
    for stage in plan(study, scale):
        done = not stale.intersection(stage.inputs) and folder.is_done(stage)
        if not done:
            stale |= set(stage.outputs)
        found.append(StageState(stage, done))
    return found


def check_inputs(study: StudyConfig, stages: Sequence[PlannedStage]) -> None:
    """Raise UsageError if an input is no file and no earlier stage writes it."""
    written: set[Path] = set()
    later = {path: stage.name for stage in stages for path in stage.outputs}
    for stage in stages:
        for path in stage.inputs:
            if path in written:
                continue
            needs = f"stage {stage.name} needs {path}"
            if path in later:
                raise UsageError(f"{needs}, which {later[path]} writes; move {later[path]} up")
            if path.is_dir():
                raise UsageError(f"{needs}, which is a directory; name the files in it")
            if not path.exists():
                how = study.prepare or "make it, or correct the stage's inputs"
                if (path.parent / "config.json").is_file():  # a model of several files
                    how = f"name {path.parent} in the stage's inputs, which stands for its files"
                raise UsageError(f"{needs}, which is not there; {how}")
        written |= set(stage.outputs)


def _run(
    study: StudyConfig, stages: Sequence[PlannedStage], runner: Runner, progress: Progress
) -> None:
    """Run what is not up to date, in threads; each stage after those whose outputs it reads.

    After a failure, running stages end and no other begins.
    """
    folder, by_name = StageFolder(study.output), {stage.name: stage for stage in stages}
    writers = {path: stage.name for stage in stages for path in stage.outputs}
    graph = TopologicalSorter(
        {s.name: [writers[path] for path in s.inputs if path in writers] for s in stages}
    )
    graph.prepare()
    running: dict[Future[None], str] = {}
    pool = ThreadPoolExecutor(study.workers)
    with _Clock(stages, progress) as clock:

        def bring_up_to_date(stage: PlannedStage) -> None:
            if not folder.is_done(stage):
                clock.listen(stage.name, "started")
                execute(stage, folder, runner)
            clock.listen(stage.name, "done")

        try:
            while graph.is_active():
                for name in graph.get_ready():
                    running[pool.submit(bring_up_to_date, by_name[name])] = name
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    future.result()
                    graph.done(running.pop(future))
        except Exception:
            pool.shutdown(cancel_futures=True)
            raise
        except BaseException:  # such as Ctrl-C
            pool.shutdown(wait=False, cancel_futures=True)
            runner.stop()
            pool.shutdown()  # whoever catches this may use the output again
            raise
    pool.shutdown()


class _Clock:
    """Reports progress in expected minutes: finished stages, and the time of running ones."""

    def __init__(self, stages: Sequence[PlannedStage], progress: Progress) -> None:
        self._minutes = {stage.name: stage.minutes_cpu for stage in stages}
        self._progress = progress
        self._started: dict[str, float] = {}
        self._done: set[str] = set()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._tick, daemon=True)

    def __enter__(self) -> _Clock:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end.set()
        self._thread.join()
        self._report()

    def listen(self, name: str, event: str) -> None:
        """A stage has started, or is done."""
        if event == "started":
            self._started[name] = time.monotonic()
        else:
            self._done.add(name)
            self._started.pop(name, None)

    def _tick(self) -> None:
        while not self._end.wait(_TICK_S):
            self._report()

    def _report(self) -> None:
        now = time.monotonic()
        running, finished = dict(self._started), tuple(self._done)  # other threads change them
        done = sum(self._minutes[name] for name in finished)
        for name, start in running.items():
            # a stage that takes longer than expected stays just below its share
            done += min((now - start) / 60, 0.95 * self._minutes[name])
        note = ", ".join(running) or f"{len(finished)} of {len(self._minutes)} stages"
        total = max(0.1, round(sum(self._minutes.values()), 1))
        self._progress("study (minutes)", min(total, round(done, 1)), total, note)
