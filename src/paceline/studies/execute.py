"""Executes one stage: its command in a process of its own, with a log, here or on a Ray cluster."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol

import torch

from paceline.config import dump_yaml, read_json_mapping
from paceline.errors import ConfigError, PacelineError, StudyError, UsageError
from paceline.processes import connect_to_ray, last_lines, stop_groups
from paceline.records import RunDirectory, atomic_write_text, is_run, storage_errors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.studies.plan import PlannedStage

_RESUMED = ("pretrain", "align", "generate-data")  # commands with the option --resume
_LOG_TAIL = 4_000
_STOP_S = 20.0
_EARLIER_S = 60.0  # that a killed study's process of the same stage may take to stop
_POLL_S = 0.1
_NAME = "paceline: "
# In the new process, not in a preexec_fn: that is unsafe when several threads start processes.
_PROGRAM = (
    "import sys; from paceline.processes import end_with_parent; "
    "end_with_parent(int(sys.argv.pop(1))); from paceline.cli.main import main; main()"
)


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
        """What the stage was run with, and whether it has ended; see `is_done`."""
        return self.output / "stages" / f"{stage.name}.json"

    def known(self, stage: PlannedStage) -> dict[str, Any]:
        """The content of the mark; empty if it is missing or damaged."""
        with suppress(ConfigError):
            return read_json_mapping(self.mark(stage))
        return {}

    def is_done(self, stage: PlannedStage) -> bool:
        """True if the stage has ended with its present configuration and content of inputs."""
        known = self.known(stage)
        there = all(path.exists() for path in (*stage.inputs, *stage.outputs))
        return known.get("done") is True and there and known.get("digest") == digest_of(stage)

    def set_mark(self, stage: PlannedStage, digest: str, *, done: bool) -> None:
        """Write the mark; a killed process leaves the old or the new one."""
        place = str(stage.folder.relative_to(self.output))
        values = {"digest": digest, "folder": place, "done": done}
        atomic_write_text(self.mark(stage), json.dumps(values) + "\n")

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
        StudyError: the command failed or did not write an output, or its directory is another's.
        StorageError: a file cannot be written.
    """
    log = folder.log(stage)
    _wait_for_earlier(stage, log)
    digest = digest_of(stage)
    _set_aside_if_stale(stage, folder, digest)
    # an earlier success is gone as soon as this run writes, however it ends
    folder.set_mark(stage, digest, done=False)
    atomic_write_text(folder.config(stage), dump_yaml(stage.config))
    begin = log.stat().st_size if log.exists() else 0
    code = run(folder.command(stage), log)
    if code != 0:
        raise StudyError(
            f"stage {stage.name} failed: {_reason(code, log, begin)}; finished stages are kept: "
            f"fix the cause and run the study again (log: {log})"
        )
    for output in stage.outputs:
        if not output.exists():
            raise StudyError(
                f"stage {stage.name} ended without writing {output}; correct its outputs in the "
                f"study file (log: {log})"
            )
    folder.set_mark(stage, digest, done=True)


def _wait_for_earlier(stage: PlannedStage, log: Path) -> None:
    """Wait for the processes of this stage that a killed study left, which save their state.

    They hold a lock on the log, which they inherit, until the last one has ended.
    """
    if not log.exists():
        return
    with log.open("ab") as stream:
        end = time.monotonic() + _EARLIER_S
        while not _lock(stream):
            if time.monotonic() > end:
                raise StudyError(
                    f"stage {stage.name} is still running for an earlier study; wait for it, or "
                    "end its process, and run the study again"
                )
            time.sleep(_POLL_S)


def _lock(stream: IO[bytes]) -> bool:
    """Lock an open file for this process and its children; False if it is locked."""
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # the file system has no locks
    return True


def _set_aside_if_stale(stage: PlannedStage, folder: StageFolder, digest: str) -> None:
    known = folder.known(stage)
    if known.get("digest") == digest or not stage.folder.exists():
        return
    is_ours = "digest" in known and known.get("folder") == str(
        stage.folder.relative_to(folder.output)
    )
    is_ours = is_ours or is_run(RunDirectory(stage.folder).read_manifest() or {})
    if not is_ours and (stage.folder.is_file() or any(stage.folder.iterdir())):
        raise StudyError(
            f"stage {stage.name} writes to {stage.folder}, which is there already and holds no "
            "run; move it, or set another output"
        )
    _set_aside(stage, folder.output / "replaced")


def _set_aside(stage: PlannedStage, parent: Path) -> None:
    with storage_errors(parent):
        parent.mkdir(parents=True, exist_ok=True)
        place = Path(tempfile.mkdtemp(prefix=f"{stage.name}-", dir=parent))
        stage.folder.rename(place / stage.folder.name)


def digest_of(stage: PlannedStage) -> str:
    """Digest of a stage's configuration and of the content of its inputs."""
    digest = hashlib.sha256(json.dumps([stage.command, stage.config], sort_keys=True).encode())
    for path in stage.inputs:
        digest.update(f"\n{path} ".encode())
        with path.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "md5").digest())
    return digest.hexdigest()[:16]


def _reason(code: int, log: Path, begin: int) -> str:
    """Why a command failed."""
    if code < 0:
        name = signal.Signals(-code).name
        return f"its process was ended by {name}{' (memory?)' if name == 'SIGKILL' else ''}"
    return last_line(log, begin) or f"exit code {code}"


def last_line(log: Path, begin: int = 0) -> str:
    """The last message after `begin`, or the last line; without the program's name."""
    lines = last_lines(log, _LOG_TAIL, begin)
    messages = [line for line in lines if line.startswith(_NAME) and "warning: " not in line]
    return (messages or lines or [""])[-1].removeprefix(_NAME)


class LocalRunner:
    """Runs commands as processes of this machine."""

    def __init__(self, workers: int = 1) -> None:
        """`workers`: Number of commands at the same time, which share the threads."""
        self._environment = dict(os.environ)
        if workers > 1:
            threads = max(1, torch.get_num_threads() // workers)
            self._environment["OMP_NUM_THREADS"] = str(threads)
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
            _lock(stream)
            process = self._start(command, stream)
            try:
                return process.wait()
            finally:
                with self._lock:
                    self._processes.discard(process)

    def _start(self, command: Sequence[str], log: IO[bytes]) -> subprocess.Popen[bytes]:
        with self._lock:  # so that stop() knows all processes
            if self._stopped:
                raise StudyError("the study was stopped; run it again")
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", _PROGRAM, str(os.getpid()), *command],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env=self._environment,
                start_new_session=True,  # Ctrl-C reaches the study, which stops its stages
            )
            self._processes.add(process)
            return process

    def stop(self) -> None:
        """End all commands with their workers, and start no more."""
        with self._lock:
            self._stopped = True
            running = list(self._processes)
        stop_groups(running, _STOP_S)


class RayRunner:
    """Runs commands as tasks of a Ray cluster whose machines share this directory."""

    def __init__(self) -> None:
        """Connect to the cluster of RAY_ADDRESS, or start one here.

        Raises:
            UsageError: Ray is not installed.
        """
        try:
            ray = connect_to_ray()
            from ray.exceptions import RayError
        except ImportError:
            message = "runner ray needs Ray: pip install -e '.[ray]', or use runner local"
            raise UsageError(message) from None
        gpus = 1 if ray.cluster_resources().get("GPU") else 0
        self._ray, self._failure = ray, RayError
        self._task = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=2)(_run_in)

    def __call__(self, command: Sequence[str], log: Path) -> int:
        """As `LocalRunner`, on a node with a free core, and a free GPU if the cluster has any."""
        task = self._task.remote(Path.cwd(), list(command), log)
        try:
            result = self._ray.get(task)
        except self._failure as error:
            reason = str(error).strip().splitlines()[-1]
            raise StudyError(f"Ray lost a stage: {reason}; run the study again") from None
        if isinstance(result, PacelineError):
            raise result
        return result

    def stop(self) -> None:
        """End the connection; Ray ends the tasks of a driver that leaves."""
        self._ray.shutdown()


def _run_in(directory: Path, command: list[str], log: Path) -> int | PacelineError:
    """A task; it returns errors, because Ray wraps raised exceptions."""
    os.chdir(directory)
    try:
        return LocalRunner()(command, log)
    except PacelineError as error:
        return error
