"""`paceline play` and `decode --trace` on the command line."""

import json
import socket
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from paceline import play
from support.texts import Run, refused


@pytest.fixture
def pair(pair_folder: Path) -> tuple[Any, ...]:
    return "--target", pair_folder / "target", "--draft", pair_folder / "draft"


def test_the_address_is_printed_and_served_until_the_user_interrupts(
    run: Run, pair: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
):
    hosts: list[str] = []

    def interrupted(_server: Any, sockets: list[socket.socket]) -> None:
        hosts.append("{}:{}".format(*sockets[0].getsockname()))
        sockets[0].close()
        raise KeyboardInterrupt

    monkeypatch.setattr(uvicorn.Server, "run", interrupted)
    code, out, _ = run("play", *pair, "--port", "0")
    assert (code, out) == (0, f"http://{hosts[0]}/\n")
    code, out, _ = run("play", *pair, "--port", "0", "--host", "0.0.0.0")
    assert out.startswith(f"http://{hosts[1]}/#token=")


def test_a_port_in_use_and_a_host_of_others_are_one_line(run: Run, pair: tuple[Any, ...]):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = refused(run, "play", *pair, "--port", port)
    assert f"cannot listen at 127.0.0.1 port {port} (Address already in use)" in line
    assert "choose another" in refused(run, "play", *pair, "--host", "192.0.2.1")
    code, _, err = run("play", *pair, "--port", "70000")
    assert (code, "65535" in err) == (2, True)


def test_a_missing_library_is_named_with_its_extra(
    run: Run, pair: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(play, "_LIBRARIES", ("starlette", "no_such_library"))
    line = refused(run, "play", *pair)
    assert "play needs no_such_library; install with: pip install -e '.[play]'" in line


def test_a_trace_has_a_row_for_each_examined_token(run: Run, pair: tuple[Any, ...]):
    given = (*pair, "--prompt", "the cat", "--max-new-tokens", "8", "--json")
    _, plain, _ = run("decode", *given)
    code, out, _ = run("decode", *given, "--trace")
    found, without = json.loads(out), json.loads(plain)
    assert code == 0
    assert (found["tokens"], "trace" in without) == (without["tokens"], False)
    stats = found["stats"]
    assert len(found["trace"]) == stats["num_accepted"] + stats["num_recovered"]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ((), "--trace needs --draft and --json"),
        (
            ("--json", "--set", "strategy={strategy: oracle_cascade}"),
            "oracle_cascade; leave it out",
        ),
    ],
)
def test_a_trace_that_cannot_be_written_is_refused(
    run: Run, pair: tuple[Any, ...], more: tuple[str, ...], said: str
):
    assert said in refused(run, "decode", *pair, "--prompt", "x", "--trace", *more)
