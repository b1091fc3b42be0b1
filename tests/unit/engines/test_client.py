"""The HTTP client of engines, counters of servers, a server's environment, and the engines."""

import os
import re
import signal
import socket
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError

from paceline.config import apply_override
from paceline.core.sampling import SamplingParams
from paceline.engines import client
from paceline.engines.client import Client, connection, root_of
from paceline.engines.commands import EngineChoice, server_command
from paceline.engines.contract import BlockCounts, Request, Setup
from paceline.engines.kinds import EngineName, RuleServer
from paceline.engines.process import ServerProcess
from paceline.engines.servers import block_counts
from paceline.engines.text_servers import TextServers
from paceline.engines.texts import OpenAIWriter
from paceline.errors import EngineError, PacelineError
from paceline.processes import spin_briefly
from support.engines import serving
from support.processes import finish, start


class Version(BaseModel):
    version: str


def fails(work: Callable[[], Any], said: str) -> None:
    with pytest.raises(PacelineError, match=re.escape(said)):
        work()


@pytest.mark.parametrize("text", ["[" * 10_000, "9" * 10_000, "x\ny", ""])
def test_an_answer_that_is_no_json_is_one_line(text: str):
    with serving({"/version": lambda _: (200, text)}) as url:
        asked = Client(url)
        fails(lambda: asked.get("/version", Version), "text that is not JSON")
        asked.close()


def test_a_stream_that_is_refused_says_why():
    with serving({"/v1/completions": lambda _: (500, "no\nmemory")}) as url:
        asked = Client(url)
        said = "answered 500 (no memory); check the server log"
        fails(lambda: list(asked.stream("/v1/completions", {})), said)
        asked.close()


@contextmanager
def dropping() -> Iterator[str]:
    """The URL of a machine that answers no attempt to connect: its queue of them is full."""
    with socket.socket() as listener, ExitStack() as stack:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(20):
            waiting = stack.enter_context(socket.socket())
            waiting.settimeout(0.3)
            try:
                waiting.connect(listener.getsockname())
            except TimeoutError:
                yield f"http://127.0.0.1:{listener.getsockname()[1]}"
                return
        pytest.skip("this system answers all attempts to connect")


@pytest.mark.parametrize("is_text", [False, True])
def test_a_machine_that_drops_packets_is_noticed_soon(
    is_text: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(client, "CONNECT_SECONDS", 0.2)
    begun = time.monotonic()
    with dropping() as url:
        if is_text:
            servers = TextServers(OpenAIWriter(url=url, patience_s=0), lambda _: [1])
            request = Request((1, 2), 4, SamplingParams(temperature=0), 0)
            fails(lambda: servers.write([request], lambda *_: None), "cannot be reached")
        else:
            asked = Client(url)
            fails(lambda: asked.ask("GET", "/health"), "cannot be reached")
            asked.close()
    assert time.monotonic() - begun < 20


@pytest.mark.parametrize(
    ("url", "root"),
    [
        ("127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://h.invalid/v1/", "http://h.invalid"),
        ("http://h.invalid/v1/models", "http://h.invalid"),
        ("http://h.invalid/v1/completions", "http://h.invalid"),
        ("http://h.invalid/a/v1/chat/completions/", "http://h.invalid/a"),
        ("https://h.invalid/v1/account/openai", "https://h.invalid/v1/account/openai"),
        ("https://h.invalid/v1beta/openai/", "https://h.invalid/v1beta/openai"),
        ("https://h.invalid/v1beta/openai/v1", "https://h.invalid/v1beta/openai"),
    ],
)
def test_the_root_of_a_server_is_what_stands_before_the_endpoint(url: str, root: str):
    assert root_of(url) == root


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "127.0.0.2", "localhost"])
def test_no_proxy_is_asked_for_this_machine(host: str):
    assert connection(f"http://{host}:1", None, 1.0)["trust_env"] is False
    assert connection("http://10.0.0.1:1", None, 1.0)["trust_env"] is True


def counters(positions: dict[str, int]) -> str:
    lines = [f"vllm:spec_decode_num_{name}_total 4" for name in ("drafts", "draft_tokens")]
    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    lines += [f'{name}{{engine="0"{place}}} {count}' for place, count in positions.items()]
    return "\n".join(lines) + "\n"


def test_counters_are_added_over_engines_and_read_by_position():
    text = counters({',position="0"': 3, ',position="1"': 2})
    twice = text + text.replace('engine="0"', 'engine="1"')
    found = BlockCounts(num_blocks=4, num_drafted=4, accepted_by_position=(3, 2))
    assert block_counts(text, "vllm:") == found
    both = block_counts(twice, "vllm:")
    assert both is not None
    assert (both.num_blocks, both.accepted_by_position) == (8, (6, 4))
    assert block_counts("vllm:requests_total 3\n", "vllm:") is None


@pytest.mark.parametrize("places", [("",), ("", '0"'), ('1"',), ('0"', '2"')])
def test_positions_that_are_missing_are_not_taken_for_others(places: tuple[str, ...]):
    """A sample without a position, or a gap, gives no counts by position."""
    named = {place and f',position="{place}': 3 for place in places}
    found = block_counts(counters(named), "vllm:")
    assert found is not None
    assert (found.num_blocks, found.accepted_by_position) == (4, None)


def test_metrics_of_another_form_are_one_line():
    with pytest.raises(EngineError, match="/metrics is not in the Prometheus format"):
        block_counts("# TYPE\nvllm:x{ 3\n", "vllm:")


def test_a_server_gets_the_users_own_setting_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    command = [sys.executable, "-c", "import os; print(os.environ['HF_HUB_OFFLINE'])"]
    given = EngineChoice(engine="vllm").server.environment("")
    with ServerProcess(command, 1, tmp_path / "log", given) as server:
        while not server.last_words():
            pass  # it waits
    assert (tmp_path / "log").read_text() == "0\n"


@pytest.mark.parametrize(
    ("given", "ours", "servers"),
    [
        ({}, "3000", None),
        ({"GOMP_SPINCOUNT": "9"}, "9", "9"),
        ({"OMP_WAIT_POLICY": "x"}, None, None),
    ],
)
def test_threads_wait_as_the_user_chose_and_those_of_a_server_as_without_paceline(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    given: dict[str, str],
    ours: str | None,
    servers: str | None,
):
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    spin_briefly()
    assert os.environ.pop("GOMP_SPINCOUNT", None) == ours
    if ours is not None:
        monkeypatch.setenv("GOMP_SPINCOUNT", ours)
    command = [sys.executable, "-c", "import os; print(os.environ.get('GOMP_SPINCOUNT'))"]
    with ServerProcess(command, 1, tmp_path / "log") as server:
        while not server.last_words():
            pass  # it waits
    assert (tmp_path / "log").read_text() == f"{servers}\n"


def test_of_a_server_that_did_not_start_the_cause_is_said(tmp_path: Path):
    """The order of vLLM 0.32: a warning, the cause, errors that follow from it, a last line."""
    log = """
        WARNING 11-30 15:31:04 [system_utils.py:255] fd limit errors like `OSError: [Errno 24]`
        (EngineCore pid=7) ERROR 11-30 15:31:09 [core.py:1] ValueError: Free memory is too small
        (APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above.
        nothing more
    """
    command = [sys.executable, "-c", f"print({log!r}); raise SystemExit(1)"]
    with ServerProcess(command, 1, tmp_path / "log", {}) as server:
        while not server.last_words():
            pass  # it waits
        said = f"; it ended: see {tmp_path}/log (ValueError: Free memory is too small)"
        assert server.last_words() == said


def test_a_server_is_started_for_the_requests_that_it_gets_at_once():
    setup = Setup("~/target", None, 20, batch_size=2)
    command = server_command(EngineChoice(engine="vllm"), setup, 1)
    assert command[:3] == ["vllm", "serve", str(Path.home() / "target")]
    given = dict(zip(command[3::2], command[4::2], strict=True))
    assert (given["--max-num-seqs"], given["--max-model-len"]) == ("2", "20")


@pytest.mark.slow
def test_a_server_ends_with_its_client_even_if_that_is_killed(tmp_path: Path):
    file = tmp_path / "server"
    server = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(600)"
    client = textwrap.dedent(f"""
        import sys, time
        from pathlib import Path
        from paceline.engines.process import ServerProcess

        file = Path(sys.argv[1])
        command = [sys.executable, "-c", {server!r}, sys.argv[1]]
        started = ServerProcess(command, 1, Path(sys.argv[1] + "-log"))
        while started._process.poll() is None and not (file.exists() and file.read_text()):
            time.sleep(0.01)
        ended = started._process.poll() is not None
        print(started.last_words() if ended else "it runs", flush=True)
        time.sleep(600)
    """)
    process = start(client, file)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "it runs\n"
    finally:
        process.kill()
        finish(process)
    assert ends(int(file.read_text()))


def ends(pid: int) -> bool:
    """Within ten seconds; else it is killed."""
    for _ in range(100):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    os.kill(pid, signal.SIGKILL)
    return False


@pytest.mark.slow
def test_configurations_accept_these_engines_alone():
    for choice, wrong in ((EngineName, "paceline"), (RuleServer, "sglang")):
        with pytest.raises(ValidationError, match="'vllm'"):
            TypeAdapter(choice).validate_python(wrong)


def test_ctrl_c_ends_the_wait_for_a_server_in_one_line():
    """In training, whose own handler lets a step end first: the second one ends at once."""
    program = textwrap.dedent("""
        import os, signal, threading, time, warnings
        from pathlib import Path
        from paceline.engines.contract import Request
        from paceline.core.sampling import SamplingParams
        from paceline.engines.texts import OpenAIWriter
        from paceline.engines import text_servers
        from paceline.train.loop import StopRequest

        waits = threading.Event()  # set by the warning that the server is not there
        warnings.showwarning = lambda *_, **__: waits.set()
        # a process in the background of a shell, and its children, ignore Ctrl-C
        signal.signal(signal.SIGINT, signal.default_int_handler)

        def press():
            waits.wait(10)
            for _ in range(2):
                time.sleep(0.2)
                os.kill(os.getpid(), signal.SIGINT)

        servers = text_servers.TextServers(OpenAIWriter(url="http://127.0.0.1:9"), lambda text: [1])
        threading.Thread(target=press, daemon=True).start()
        try:
            with StopRequest():
                servers.write([Request([1], 2, SamplingParams(), 0)] * 40, lambda *_: None)
        except KeyboardInterrupt:
            print("interrupted")
    """)
    done = finish(start(program))
    assert (done.returncode, done.stdout, done.stderr) == (0, "interrupted\n", "")


def test_an_engine_may_be_given_by_its_name():
    read = TypeAdapter(EngineChoice).validate_python
    assert read("vllm") == read({"engine": "vllm"}) == EngineChoice(engine="vllm")
    values: dict[str, object] = {"engine": "vllm"}
    apply_override(values, "engine.url=http://localhost:8000")
    assert values == {"engine": {"engine": "vllm", "url": "http://localhost:8000"}}
