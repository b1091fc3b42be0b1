"""generate-data through real servers: kills of the client and of a server, and one that joins.

A whole run, then one whose client is killed ten times. Of its two servers, one starts late and
the other is killed and started again. Both runs have the same records but for what is sampled.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from paceline.engines.client import Client
from paceline.engines.process import free_port
from paceline.errors import EngineError
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

NUM_PROMPTS, NUM_KILLS = 150, 10
NUM_RECORDS = 2 * NUM_PROMPTS  # at two temperatures
AT_ONCE = 8


@pytest.fixture(params=["vllm", "llamacpp"])
def command(request: pytest.FixtureRequest) -> Callable[[int], list[str]]:
    """The command that starts a server at a port."""
    engine = request.param
    skip_without(engine)
    if engine == "llamacpp":
        size = ("-c", str(128 * AT_ONCE), "-np", str(AT_ONCE), "-t", "1")
        return lambda port: [str(PROGRAMS[engine]), "-m", str(TARGET), *size, "--port", str(port)]
    named = (str(target_of_vllm()), "--served-model-name", "target")
    options = ("--enforce-eager", "--max-model-len", "128", "--max-num-seqs", str(AT_ONCE))
    start = [str(PROGRAMS[engine]), "serve", *named, *options]
    return lambda port: [*start, "--host", "127.0.0.1", "--port", str(port)]


class Server:
    """A server at a port that stays the same when it is started again."""

    def __init__(self, command: Callable[[int], list[str]]) -> None:
        self._command = command
        self._port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        self._process = subprocess.Popen(
            self._command(self._port),
            env=os.environ | ENVIRONMENT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def wait(self) -> None:
        with closing(Client(self.url)) as client:
            for _ in range(600):
                with suppress(EngineError):
                    client.ask("GET", "/health")
                    return
                time.sleep(0.5)
        raise AssertionError("the server does not answer")

    def kill(self) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None


@contextmanager
def servers(command: Callable[[int], list[str]]) -> Iterator[tuple[Server, Server]]:
    pair = Server(command), Server(command)
    try:
        yield pair
    finally:
        for server in pair:
            server.kill()


def client(folder: Path, output: str, *urls: str, **more: Any) -> subprocess.Popen[str]:
    writer = {
        "kind": "openai",
        "url": list(urls),
        "concurrency": AT_ONCE,
        "top_logprobs": 3,
        "patience_s": 600,
        **more,
    }
    settings = {
        "target": str(TARGET),
        "prompts": str(folder / "prompts.jsonl"),
        "output": str(folder / output),
        "writer": writer,
        "temperatures": [0.0, 1.0],
        "num_per_prompt": 2,
        "max_prompt_tokens": 32,
        "max_new_tokens": MAX_NEW_TOKENS,
        "shard_size": AT_ONCE,
    }
    config = folder / f"{output}.yaml"
    config.write_text(json.dumps(settings))
    command = [sys.executable, "-m", "paceline.cli.main", "generate-data", "--config", str(config)]
    if (folder / output).exists():
        command.append("--resume")
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder
    )


def run_to_the_end(process: subprocess.Popen[str]) -> None:
    said, _ = process.communicate()
    assert process.returncode == 0, said


def wait_for(process: subprocess.Popen[str], run: Path, count: int) -> None:
    """Until the run holds so many records."""
    while held(run) < count:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.01)


def test_kills_lose_nothing_and_a_second_server_joins(command: Any, tmp_path: Path):
    write_prompts(tmp_path / "prompts.jsonl", NUM_PROMPTS)
    run = tmp_path / "killed"
    rng = random.Random(0)
    with servers(command) as (first, second):
        first.start()
        first.wait()
        run_to_the_end(client(tmp_path, "whole", first.url))
        for number in range(NUM_KILLS):
            process = client(tmp_path, "killed", first.url, second.url)
            wait_for(process, run, held(run) + rng.randint(1, 4))
            if number == 3:  # the client goes on when the server is back
                first.kill()
                time.sleep(2)
                before = held(run)
                first.start()
                wait_for(process, run, before + 4)
            if number == 6:  # what comes now is the second server's
                first.kill()
                before = held(run)
                second.start()
                wait_for(process, run, before + AT_ONCE + 1)
                first.start()
            process.kill()
            process.communicate()
        assert held(run) < NUM_RECORDS, "there is something left for the last run"
        run_to_the_end(client(tmp_path, "killed", first.url, second.url))
    kept, expected = (provenance(tmp_path / name) for name in ("killed", "whole"))
    assert len(kept) == NUM_RECORDS
    assert kept == expected
