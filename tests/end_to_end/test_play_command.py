"""`paceline play` on the command line."""

import socket
from pathlib import Path
from typing import Any

import pytest

from paceline.play.server import Playground
from support.texts import Run, refused


@pytest.fixture
def pair(pair_folder: Path) -> tuple[Any, ...]:
    return "--target", pair_folder / "target", "--draft", pair_folder / "draft"


def test_the_address_is_printed_and_served_until_the_user_interrupts(
    run: Run, pair: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
):
    hosts: list[str] = []

    def interrupted(playground: Playground) -> None:
        hosts.append("{}:{}".format(*playground.socket.getsockname()))
        raise KeyboardInterrupt

    monkeypatch.setattr(Playground, "serve_forever", interrupted)
    code, out, _ = run("play", *pair, "--port", "0")
    assert (code, out) == (0, f"http://{hosts[0]}/\n")


def test_a_port_in_use_is_one_line(run: Run, pair: tuple[Any, ...]):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = refused(run, "play", *pair, "--port", port)
    assert f"cannot listen at port {port} (Address already in use)" in line
    assert "choose another" in line
    code, _, err = run("play", *pair, "--port", "70000")
    assert (code, "65535" in err) == (2, True)
