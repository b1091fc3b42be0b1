"""generate-data on a local Ray whose workers start servers: kills of a worker and of the client.

A server ends with its worker. Ray starts a worker that was killed again, and that a server; the
records are those of a run in one process but for what is sampled.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from support.engines import (
    ENVIRONMENT,
    MAX_NEW_TOKENS,
    PROGRAMS,
    TARGET,
    held,
    provenance,
    skip_without,
    target_of_vllm,
    write_prompts,
)

pytestmark = pytest.mark.engines
pytest.importorskip("ray", reason="Ray is not installed")

NUM_PROMPTS = 60
NUM_RECORDS = 2 * NUM_PROMPTS  # at two temperatures
SECONDS = 900.0  # for a server to start, or to end; Ray lowers the priority of its workers


class Run:
    """A run of generate-data; its servers leave their process ids in a file."""

    def __init__(self, folder: Path, name: str, server: str, **settings: Any) -> None:
        self.path = folder / name
        self.log = folder / f"{name}.log"
        self._pids = folder / f"{name}.pids"
        self._config = folder / f"{name}.yaml"
        program = folder / f"{name}-server"
        # exec keeps the process, and what it is sent when its parent ends
        program.write_text(f'#!/bin/sh\necho $$ >> {self._pids}\nexec {PROGRAMS[server]} "$@"\n')
        program.chmod(0o755)
        choice: dict[str, Any] = {"engine": server, "program": str(program)}
        if server == "vllm":
            choice |= {"options": ["--enforce-eager"], "target": str(target_of_vllm())}
        else:
            choice |= {"options": ["-t", "1"]}
        common = {
            "target": str(TARGET),
            "prompts": str(folder / "prompts.jsonl"),
            "output": str(self.path),
            "writer": {"kind": "engine", "engine": choice, "concurrency": 4, "top_logprobs": 3},
            "temperatures": [0.0, 1.0],
            "num_per_prompt": 2,
            "max_prompt_tokens": 32,
            "max_new_tokens": MAX_NEW_TOKENS,
            "shard_size": 4,
        }
        self._config.write_text(json.dumps(common | settings))

    @contextmanager
    def client(self) -> Iterator[subprocess.Popen[bytes]]:
        command = [sys.executable, "-m", "paceline.cli.main", "generate-data"]
        command += ["--config", str(self._config), *(["--resume"] if self.path.exists() else [])]
        environment = os.environ | ENVIRONMENT | {"RAY_USAGE_STATS_ENABLED": "0"}
        environment["PACELINE_PROGRAMS"] = str(self.path.with_name(f"{self.path.name}-server"))
        with self.log.open("ab") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        try:
            yield process
        finally:
            process.kill()
            process.wait()
            for pid in self.servers():
                with suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)

    def servers(self) -> list[int]:
        """Those that are there."""
        return [pid for pid in self.started() if runs(pid)]

    def started(self) -> list[int]:
        """All servers of this run so far."""
        return list(map(int, self._pids.read_text().split())) if self._pids.exists() else []

    def wait_for(self, what: Callable[[], object]) -> None:
        end = time.monotonic() + SECONDS
        while not what():
            assert time.monotonic() < end, self.log.read_text()
            time.sleep(0.02)

    def to_the_end(self) -> None:
        with self.client() as client:
            assert client.wait(SECONDS) == 0, self.log.read_text()
            self.wait_for(lambda: not self.servers())


def about(pid: int) -> tuple[str, int]:
    """State and parent of a process; an empty state if it is not there."""
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except (FileNotFoundError, ProcessLookupError):
        return "", 0
    return state, int(parent)


def runs(pid: int) -> bool:
    return about(pid)[0] not in ("", "Z")


def session(pid: int) -> list[int]:
    """All processes in the session of a server."""
    pids = (int(path.name) for path in Path("/proc").glob("[0-9]*"))
    return [each for each in pids if runs(each) and in_session(each, pid)]


def in_session(pid: int, leader: int) -> bool:
    with suppress(ProcessLookupError):
        return os.getsid(pid) == leader
    return False


@pytest.mark.parametrize(("engine", "workers"), [("llamacpp", 1), ("llamacpp", 2), ("vllm", 1)])
def test_a_killed_worker_of_ray_takes_its_server_along_and_loses_nothing(
    engine: str, workers: int, tmp_path: Path
):
    skip_without(engine)
    write_prompts(tmp_path / "prompts.jsonl", NUM_PROMPTS)
    whole = Run(tmp_path, "whole", engine)
    whole.to_the_end()
    run = Run(tmp_path, "ray", engine, pool="ray", workers=workers)
    with run.client() as client:
        for number in range(2):
            before = held(run.path) if number else 0
            run.wait_for(lambda: len(run.servers()) == workers)
            run.wait_for(lambda count=before: held(run.path) > count + 2)
            server = run.servers()[0]
            processes, worker = session(server), about(server)[1]
            os.kill(worker, signal.SIGKILL)
            run.wait_for(lambda these=processes: not any(map(runs, these)))
            assert client.poll() is None, "the run goes on"
        run.wait_for(lambda: len(run.servers()) == workers)
        run.wait_for(lambda: len(run.started()) == workers + 2)
        processes = [each for server in run.servers() for each in session(server)]
        client.kill()
        client.wait()
        run.wait_for(lambda: not any(map(runs, processes)))
    assert held(run.path) < NUM_RECORDS, "there is something left for the last run"
    run.to_the_end()
    kept, expected = provenance(run.path), provenance(whole.path)
    assert len(kept) == NUM_RECORDS
    assert kept == expected
