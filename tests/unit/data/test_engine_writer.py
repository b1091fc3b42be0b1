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

from paceline.data.distillation_data import generate_data
from paceline.data.requests import GenerateDataConfig
from paceline.errors import ConfigError, EngineError, UsageError
from support.data import answers, generation
from support.engines import Served, serving
from support.runs import write_corpus

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


@pytest.fixture(scope="module")
def folder(folder: Path) -> Iterator[Path]:
    write_corpus(folder / "prompts.jsonl", [{"prompt": f"number {n}"} for n in range(6)])
    program = folder / "vllm"
    program.write_text(PROGRAM)
    program.chmod(0o755)
    routes = Served(folder).routes | {"/health": lambda _: (200, "")}
    with serving(routes) as url:  # the answers of all servers that are started
        (folder / "url").write_text(url)
        yield folder


def config(folder: Path, output: Path, **changes: Any) -> GenerateDataConfig:
    engine = {"engine": "vllm", "program": str(folder / "vllm")}
    writer = {"kind": "engine", "engine": engine, "concurrency": 2, "top_logprobs": 3}
    few = {"temperatures": [1], "num_per_prompt": 1, "shard_size": 2}
    return generation(folder, output, **{"writer": writer} | few | changes)


def started(folder: Path) -> list[Path]:
    return sorted(folder.glob("server-*"))


def is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def all_end(pids: list[int]) -> bool:
    """Within ten seconds; else they are killed."""
    left = pids
    for _ in range(100):
        left = [pid for pid in left if is_there(pid)]
        if not left:
            return True
        time.sleep(0.1)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return False


def test_each_worker_starts_a_server_and_ends_it(folder: Path, tmp_path: Path):
    earlier = started(folder)
    run = generate_data(config(folder, tmp_path / "run", workers=2))
    servers = [file for file in started(folder) if file not in earlier]
    pids = [int(file.name.rpartition("-")[2]) for file in servers]
    assert len(pids) == 2
    assert all_end(pids), "the servers end with their workers"
    settings = servers[0].read_text()
    assert '"--max-logprobs": "3"' in settings
    assert '"--max-num-seqs": "2"' in settings
    assert '"--max-model-len": "20"' in settings
    served = Served(folder)
    with serving(served.routes) as url:
        writer = {"kind": "openai", "url": url, "top_logprobs": 3}
        other = generate_data(config(folder, tmp_path / "other", writer=writer))
    assert answers(run) == answers(other)


def test_a_server_that_does_not_start_is_one_line(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("paceline.engines.process._POLL_S", 0.02)
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
    ],
)
def test_what_is_no_server_to_start_is_one_line(tmp_path: Path, engine: dict[str, Any], says: str):
    writer = {"kind": "engine", "engine": engine, "top_logprobs": 3}
    with pytest.raises(ConfigError, match=re.escape(says)):
        config(tmp_path, tmp_path, writer=writer)


def test_servers_end_with_their_client_even_if_that_is_killed(tmp_path: Path):
    """Not with the thread that started one of them."""
    files = [tmp_path / name for name in ("server-of-main", "server-of-thread")]
    server = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(600)"
    client = textwrap.dedent(f"""
        import sys, threading, time
        from pathlib import Path
        from paceline.engines.process import ServerProcess

        started = []

        def start(file):
            command = [sys.executable, "-c", {server!r}, file]
            started.append(ServerProcess(command, 1, Path(file + "-log")))

        start(sys.argv[1])
        thread = threading.Thread(target=start, args=sys.argv[2:])
        thread.start()
        thread.join()
        for one, file in zip(started, map(Path, sys.argv[1:])):
            while one._process.poll() is None and not (file.exists() and file.read_text()):
                time.sleep(0.01)
            ended = one._process.poll() is not None
            print(one.last_words() if ended else "it runs", flush=True)
        time.sleep(600)
    """)
    command = [sys.executable, "-c", client, *files]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert [process.stdout.readline() for _ in files] == ["it runs\n"] * 2
        finally:
            process.kill()
    pids = [int(file.read_text()) for file in files]
    assert all_end(pids)
