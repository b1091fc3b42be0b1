"""Real servers that are killed and started again, and generate-data as their client."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from paceline.engines.client import Client
from paceline.engines.hidden_states import serve_arguments
from paceline.engines.process import free_port
from paceline.errors import EngineError
from support.engines import ENVIRONMENT, MAX_NEW_TOKENS, PROGRAMS, TARGET, held, target_of_vllm

AT_ONCE = 8
_NUM_LAYERS = 30  # of the target


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


def vllm_command(port: int, *given: str) -> list[str]:
    """vLLM with the target in float32, 8 requests at a time."""
    named = (str(target_of_vllm()), "--served-model-name", "target", "--dtype", "float32")
    size = ("--enforce-eager", "--max-model-len", "128", "--max-num-seqs", str(AT_ONCE))
    where = ("--host", "127.0.0.1", "--port", str(port))
    return [str(PROGRAMS["vllm"]), "serve", *named, *size, *given, *where]


def states_command(states: Path, port: int) -> list[str]:
    """The same, and it writes hidden states; PYTHONPATH has the folder of the connector."""
    *given, transfer = serve_arguments(_NUM_LAYERS, str(states))
    own = {"kv_connector": "OnProcessors", "kv_connector_module_path": "cpu_connector"}
    return vllm_command(port, *given, json.dumps(json.loads(transfer) | own))


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
