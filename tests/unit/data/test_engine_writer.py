"""generate-data with servers that the workers start themselves."""

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.config import validate
from paceline.data.answering import ShardStore
from paceline.data.distillation_data import generate_data
from paceline.data.requests import GenerateDataConfig
from paceline.errors import ConfigError, EngineError, UsageError
from paceline.permissions import given
from support.engines import Served, serving
from support.runs import write_corpus, write_pair

pytestmark = pytest.mark.slow

TESTS = Path(__file__).parents[2]
PROGRAM = textwrap.dedent(f"""\
    #!{sys.executable} -S
    # A vllm that writes with a tiny target; its process id and arguments stay in a file.
    import json, os, sys
    from pathlib import Path

    sys.path.insert(0, {str(TESTS)!r})
    from support.fake_llama_server import relay

    assert sys.argv[1] == "serve"
    given = dict(zip(sys.argv[3::2], sys.argv[4::2]))
    folder = Path(sys.argv[2]).parent
    (folder / f"server-{{os.getpid()}}").write_text(json.dumps(given))
    if "--dies" in given:
        sys.exit("no memory left: an error")
    relay((folder / "url").read_text(), int(given["--port"]))
    """)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    folder = write_pair(tmp_path / "pair")
    write_corpus(folder / "prompts.jsonl", [{"prompt": f"number {n}"} for n in range(6)])
    program = folder / "vllm"
    program.write_text(PROGRAM)
    program.chmod(0o755)
    routes = Served(folder).routes | {"/health": lambda _: (200, "")}
    with serving(routes) as url:  # the answers of all servers that are started
        (folder / "url").write_text(url)
        yield folder


def config(folder: Path, output: Path, **changes: Any) -> GenerateDataConfig:
    values: dict[str, Any] = {
        "target": str(folder / "target"),
        "writer": {
            "kind": "engine",
            "engine": {"engine": "vllm", "program": str(folder / "vllm")},
            "concurrency": 2,
            "top_logprobs": 3,
        },
        "output": str(output),
        "prompts": str(folder / "prompts.jsonl"),
        "temperatures": [1],
        "max_prompt_tokens": 8,
        "max_new_tokens": 12,
        "shard_size": 2,
    }
    return validate(GenerateDataConfig, given(values | changes))


def started(folder: Path) -> list[Path]:
    return sorted(folder.glob("server-*"))


def runs(file: Path) -> bool:
    """Whether the process that wrote the file is there."""
    try:
        os.kill(int(file.name.rpartition("-")[2]), 0)
    except ProcessLookupError:
        return False
    return True


def test_each_worker_starts_a_server_and_ends_it(folder: Path, tmp_path: Path):
    run = generate_data(config(folder, tmp_path / "run", workers=2))
    servers = started(folder)
    assert len(servers) == 2
    for _ in range(100):
        if not any(map(runs, servers)):
            break
        time.sleep(0.1)
    assert not any(map(runs, servers)), "the servers end with their workers"
    settings = servers[0].read_text()
    assert '"--max-logprobs": "3"' in settings
    assert '"--max-num-seqs": "2"' in settings
    assert '"--max-model-len": "20"' in settings
    served = Served(folder)
    with serving(served.routes) as url:
        writer = {"kind": "openai", "url": url, "top_logprobs": 3}
        other = generate_data(config(folder, tmp_path / "other", writer=writer))
    assert ShardStore(run / "data").read() == ShardStore(other / "data").read()


def test_a_server_that_does_not_start_is_one_line(folder: Path, tmp_path: Path):
    dying = {"engine": "vllm", "program": str(folder / "vllm"), "options": ["--dies", "now"]}
    writer = {"kind": "engine", "engine": dying}
    with pytest.raises(EngineError, match=r"vllm ended while it was starting.*no memory left"):
        generate_data(config(folder, tmp_path / "run", writer=writer))
    missing = {"kind": "engine", "engine": {"engine": "vllm", "program": "/nowhere/vllm"}}
    with pytest.raises(UsageError, match="/nowhere/vllm is not installed here"):
        generate_data(config(folder, tmp_path / "run", writer=missing))


@pytest.mark.parametrize(
    ("engine", "says"),
    [
        ({"engine": "transformers"}, "give vllm, sglang or llamacpp without url"),
        ({"engine": "vllm", "url": "http://127.0.0.1:1"}, "set writer.kind to openai"),
        ({"engine": "vllm", "draft": "d"}, "writer.engine.draft is not used"),
    ],
)
def test_what_is_no_server_to_start_is_one_line(
    folder: Path, tmp_path: Path, engine: dict[str, Any], says: str
):
    with pytest.raises(ConfigError, match=re.escape(says)):
        config(folder, tmp_path, writer={"kind": "engine", "engine": engine})


@pytest.mark.parametrize("in_a_thread", [False, True])
def test_a_server_ends_with_its_client_even_if_that_is_killed(tmp_path: Path, in_a_thread: bool):
    """Not with the thread that started it."""
    file = tmp_path / "pid"
    server = f"import os, time; open({str(file)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    client = textwrap.dedent(f"""
        import sys, threading, time
        from pathlib import Path
        from paceline.engines.process import ServerProcess

        started = []

        def start():
            log = Path({str(tmp_path / "log")!r})
            started.append(ServerProcess([sys.executable, "-c", {server!r}], 1, log))

        if {in_a_thread}:
            thread = threading.Thread(target=start)
            thread.start()
            thread.join()
        else:
            start()
        while not (ended := started[0].last_words()) and not Path({str(file)!r}).exists():
            pass
        print(ended or "it runs", flush=True)
        time.sleep(600)
    """)
    command = [sys.executable, "-c", client]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "it runs\n"
        finally:
            process.kill()
    pid = int(file.read_text())
    for _ in range(100):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    os.kill(pid, signal.SIGKILL)
    pytest.fail("the server is still there")
