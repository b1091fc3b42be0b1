"""Executes one stage: its command in a process of its own, with a log, here or on a Ray cluster."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import yaml

from paceline.errors import StudyError, UsageError
from paceline.processes import end_with_parent
from paceline.records import RunDirectory, atomic_write_text, storage_errors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.studies.plan import PlannedStage

_RESUMED = ("pretrain", "align", "generate-data")  # commands with the option --resume
_LOG_TAIL = 4_000
_STOP_S = 20.0


class Runner(Protocol):
    """Runs a command and waits. -> its exit code."""

    def __call__(self, command: Sequence[str], log: Path) -> int: ...
    def stop(self) -> None: ...


class StageFolder:
    """Files of a study about its stages: configurations, logs, and what each stage was run with."""

    def __init__(self, output: Path) -> None:
        self.output = output

    def config(self, stage: PlannedStage) -> Path:
        """The configuration of the command."""
        return self.output / "stages" / f"{stage.name}.yaml"

    def log(self, stage: PlannedStage) -> Path:
        """What the command printed."""
        return self.output / "logs" / f"{stage.name}.log"

    def mark(self, stage: PlannedStage) -> Path:
        """Digest of the inputs and the configuration that the outputs belong to."""
        return self.output / "stages" / f"{stage.name}.json"

    def command(self, stage: PlannedStage) -> list[str]:
        """The command line after `paceline`; a user can run it by hand."""
        command = [stage.command, "--config", str(self.config(stage))]
        begun = RunDirectory(stage.folder).manifest.exists()
        if begun and stage.command in _RESUMED:
            command.append("--resume")
        return command


def execute(stage: PlannedStage, folder: StageFolder, run: Runner) -> None:
    """Run a stage, or resume it.

    Outputs of other inputs or another configuration are moved to `replaced/` first.

    Raises:
        StudyError: the command failed, or did not write an output.
        StorageError: a file cannot be written.
    """
    _set_aside_if_stale(stage, folder)
    atomic_write_text(folder.config(stage), yaml.safe_dump(stage.config, sort_keys=False))
    log = folder.log(stage)
    code = run(folder.command(stage), log)
    if code != 0:
        reason = last_line(log) or f"exit code {code}"
        raise StudyError(
            f"stage {stage.name} failed: {reason}; finished stages are kept: mend it and run the "
            f"study again (log: {log})"
        )
    for output in stage.outputs:
        if not output.exists():
            raise StudyError(
                f"stage {stage.name} ended without writing {output}; correct its outputs in the "
                f"study file (log: {log})"
            )


def _set_aside_if_stale(stage: PlannedStage, folder: StageFolder) -> None:
    mark, digest = folder.mark(stage), digest_of(stage)
    known: dict[str, Any] = {}
    if mark.exists():
        with suppress(ValueError):
            known = json.loads(mark.read_text(encoding="utf-8"))
    if known.get("digest") == digest:
        return
    if stage.folder.exists():
        _set_aside(stage.folder, folder.output / "replaced")
    atomic_write_text(mark, json.dumps({"digest": digest}) + "\n")


def _set_aside(place: Path, parent: Path) -> None:
    with storage_errors(parent):
        parent.mkdir(parents=True, exist_ok=True)
        number = sum(1 for _ in parent.iterdir())
        place.rename(parent / f"{number}-{place.name}")


def digest_of(stage: PlannedStage) -> str:
    """Digest of a stage's configuration and of the content of its inputs."""
    digest = hashlib.sha256(json.dumps([stage.command, stage.config], sort_keys=True).encode())
    for path in stage.inputs:
        digest.update(f"\n{path} ".encode())
        with path.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "md5").digest())
    return digest.hexdigest()[:16]


def last_line(log: Path) -> str:
    """The last line of a log that is not empty, without the program's name."""
    with log.open("rb") as stream:
        stream.seek(max(0, log.stat().st_size - _LOG_TAIL))
        lines = stream.read().decode("utf-8", errors="replace").splitlines()
    found = [line.strip() for line in lines if line.strip()]
    return found[-1].removeprefix("paceline: ") if found else ""


class LocalRunner:
    """Runs commands as processes of this machine."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._processes: set[subprocess.Popen[bytes]] = set()
        self._stopped = False

    def __call__(self, command: Sequence[str], log: Path) -> int:
        """Run `paceline COMMAND` with its output in `log`.

        The process gets SIGTERM if this one dies.
        """
        with storage_errors(log):
            log.parent.mkdir(parents=True, exist_ok=True)
            stream = log.open("ab")
        with stream:
            process = subprocess.Popen(
                [sys.executable, "-m", "paceline.cli.main", *command],
                stdout=stream,
                stderr=stream,
                stdin=subprocess.DEVNULL,
                preexec_fn=end_with_parent,
                start_new_session=True,  # Ctrl-C reaches the study, which stops its stages
            )
            return self._wait(process)

    def _wait(self, process: subprocess.Popen[bytes]) -> int:
        with self._lock:
            self._processes.add(process)
            if self._stopped:
                process.terminate()
        try:
            return process.wait()
        finally:
            with self._lock:
                self._processes.discard(process)

    def stop(self) -> None:
        """Terminate all commands, and those that are started later."""
        with self._lock:
            self._stopped = True
            running = list(self._processes)
        for process in running:
            process.terminate()
        for process in running:
            with suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_S)


class RayRunner:
    """Runs commands as tasks of a Ray cluster whose machines share this directory."""

    def __init__(self) -> None:
        """Connect to the cluster of RAY_ADDRESS, or start one here.

        Raises:
            UsageError: Ray is not installed.
        """
        try:
            import ray
            from ray.exceptions import RayError
        except ImportError:
            message = "engine ray needs Ray: pip install -e '.[ray]', or use engine local"
            raise UsageError(message) from None
        if not ray.is_initialized():
            ray.init(log_to_driver=False)
        gpus = 1 if ray.cluster_resources().get("GPU") else 0
        self._ray, self._failure = ray, RayError
        self._task = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=2)(_run_in)

    def __call__(self, command: Sequence[str], log: Path) -> int:
        """As `LocalRunner`, on a node with a free core, and a free GPU if the cluster has any."""
        task = self._task.remote(Path.cwd(), list(command), log)
        try:
            return self._ray.get(task)
        except self._failure as error:
            reason = str(error).strip().splitlines()[-1]
            raise StudyError(f"Ray lost a stage: {reason}; run the study again") from None

    def stop(self) -> None:
        """End the connection; Ray ends the tasks of a driver that leaves."""
        self._ray.shutdown()


def _run_in(directory: Path, command: list[str], log: Path) -> int:
    os.chdir(directory)
    return LocalRunner()(command, log)
