"""The HTTP client of engines: certificates, limits of answers, keys; and a server's log."""

import socket
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from paceline.core.sampling import SamplingParams
from paceline.engines import client, text_servers
from paceline.engines.client import Client, api_key, certificates, root_of, transport
from paceline.engines.commands import EngineChoice, Setup, server_environment
from paceline.engines.contract import Request
from paceline.engines.kinds import Capacity
from paceline.engines.process import ServerProcess
from paceline.engines.text_servers import TextServers
from paceline.engines.texts import OpenAIWriter
from paceline.errors import EngineError, PacelineError, UsageError


@pytest.fixture(autouse=True)
def _nothing_loaded() -> Iterator[None]:
    certificates.cache_clear()
    yield
    certificates.cache_clear()


def test_clients_share_their_certificates():
    for _ in range(3):
        Client("https://example.invalid").close()
    assert certificates.cache_info().misses == 1


@pytest.mark.parametrize("content", [None, ""])
def test_a_wrong_file_of_certificates_is_one_line(
    content: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    file = tmp_path / "certificates.pem"
    if content is not None:
        file.write_text(content)
    monkeypatch.setenv("SSL_CERT_FILE", str(file))
    with pytest.raises(EngineError) as caught:
        Client("https://example.invalid")
    said = str(caught.value)
    assert f"cannot read trusted certificates from {file}" in said
    assert "\n" not in said
    Client("http://127.0.0.1:9").close()  # the environment is of no concern to this machine


KEY = "SECRET-KEY"
Parts = Callable[[], Iterator[bytes]]


class Version(BaseModel):
    version: str


@contextmanager
def sending(parts: Parts) -> Iterator[str]:
    """The URL of a server that answers every request with these bytes."""
    listener = socket.create_server(("127.0.0.1", 0))

    def answer(connection: socket.socket) -> None:
        with connection:
            connection.recv(65536)
            try:
                for part in parts():
                    connection.sendall(part)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(65536):
                    pass
            except OSError:  # the client has had enough
                return

    def serve() -> None:
        while True:
            try:
                connection = listener.accept()[0]
            except OSError:
                return
            threading.Thread(target=answer, args=(connection,), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def body(content: bytes, head: str = "200 OK", **headers: str) -> Parts:
    lines = [f"HTTP/1.1 {head}", *(f"{k.replace('_', '-')}: {v}" for k, v in headers.items())]
    lines += ["Connection: close", f"Content-Length: {len(content)}"]  # one answer for each
    whole = "\r\n".join([*lines, "", ""]).encode() + content
    return lambda: iter([whole])


def endless(head: str, part: bytes) -> Parts:
    def parts() -> Iterator[bytes]:
        yield f"HTTP/1.1 {head}\r\n\r\n".encode()
        while True:
            yield part

    return parts


def dripping() -> Iterator[bytes]:
    yield b"HTTP/1.1 200 OK\r\n\r\n"
    while True:
        yield b"x"
        threading.Event().wait(0.02)


BOMB = zlib.compress(b"x" * 10_000_000)
HOSTILE = {
    "large": (endless("200 OK", b"x" * 65536), "answered with more than 1,000,000 bytes"),
    "error": (endless("500 No", b"x" * 65536), "answered with more than 1,000,000 bytes"),
    "bomb": (body(BOMB, Content_Encoding="deflate"), "in the encoding 'deflate'"),
    "drip": (dripping, "did not end its answer in 0 s"),
    "deep": (body(b"[" * 10_000), "text that is not JSON"),
    "codec": (body(b"x", Content_Type="text/plain; charset=zlib_codec"), "text that is not JSON"),
    "digits": (body(b"9" * 10_000), "text that is not JSON"),
    "echo": (body(f"no: {KEY}".encode(), "401 No"), "answered 401 (no: ***)"),
    "text": (body(KEY.encode()), "text that is not JSON ('***')"),
}


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "MOST_BYTES", 1_000_000)
    monkeypatch.setattr(client, "SECONDS", 0.2)
    monkeypatch.setenv("SERVER_KEY", KEY)


def fails(work: Callable[[], Any], said: str) -> None:
    with pytest.raises(PacelineError) as caught:
        work()
    message = str(caught.value)
    assert said in message
    assert KEY not in message
    assert "\n" not in message


@pytest.mark.parametrize("name", HOSTILE)
def test_an_engine_that_sends_too_much_is_one_line(name: str):
    parts, said = HOSTILE[name]
    with sending(parts) as url:
        asked = Client(url, api_key("SERVER_KEY", []))
        fails(lambda: asked.get("/version", Version), said)
        asked.close()


@pytest.mark.parametrize("name", ["large", "error", "drip", "bomb"])
def test_a_stream_has_the_same_limits(name: str):
    parts, said = HOSTILE[name]
    with sending(parts) as url:
        asked = Client(url)
        fails(lambda: list(asked.stream("/v1/completions", {})), said)
        asked.close()


@pytest.mark.parametrize("name", HOSTILE)
def test_a_server_that_writes_texts_has_the_same_limits(name: str, monkeypatch: pytest.MonkeyPatch):
    parts, said = HOSTILE[name]
    monkeypatch.setattr(text_servers, "_RETRIES", 0)
    monkeypatch.setattr(text_servers, "identify", lambda *_: ("model", "other"))
    with sending(parts) as url:
        settings = {"api_key_env": "SERVER_KEY", "timeout_s": 0.2, "patience_s": 0}
        writer = OpenAIWriter.model_validate({"url": url, "model": "model", **settings})
        servers = TextServers(writer, lambda _: [1])
        request = Request((1, 2), 4, SamplingParams(temperature=0), 0)
        fails(lambda: servers.write([request], lambda *_: None), said)


@pytest.mark.parametrize("name", ["large", "bomb"])
def test_an_answer_beyond_the_limits_is_asked_for_again_four_times(
    name: str, monkeypatch: pytest.MonkeyPatch
):
    """With every patience: the server is there, and would send the same again."""
    parts, said = HOSTILE[name]
    asked: list[int] = []

    def counted() -> Iterator[bytes]:
        asked.append(1)
        return parts()

    monkeypatch.setattr(text_servers, "identify", lambda *_: ("model", "other"))
    with sending(counted) as url:
        servers = TextServers(OpenAIWriter(url=url, patience_s=20), lambda _: [1])
        request = Request((1, 2), 4, SamplingParams(temperature=0), 0)
        fails(lambda: servers.write([request], lambda *_: None), said)
    assert len(asked) == 4


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
    monkeypatch.setattr(client, "SECONDS", 60.0)
    monkeypatch.setattr(client, "CONNECT_SECONDS", 0.2)
    begun = time.monotonic()
    with dropping() as url:
        if is_text:
            servers = TextServers(OpenAIWriter(url=url, patience_s=0), lambda _: [1])
            request = Request((1, 2), 4, SamplingParams(temperature=0), 0)
            fails(lambda: servers.write([request], lambda *_: None), "cannot be reached")
        else:
            asked = Client(url)
            fails(lambda: asked.get_text("/health"), "cannot be reached")
            asked.close()
    assert time.monotonic() - begun < 20


def test_the_end_of_a_line_of_a_file_is_no_part_of_a_key(monkeypatch: pytest.MonkeyPatch):
    got: list[str] = []

    class Listening(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            got.append(self.headers["Authorization"])
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            del format, args

    monkeypatch.setenv("SERVER_KEY", f"{KEY}\r\n")
    with HTTPServer(("127.0.0.1", 0), Listening) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        asked = Client(f"http://127.0.0.1:{server.server_port}", api_key("SERVER_KEY", []))
        asked.get_text("/health")
        asked.close()
    assert got == [f"Bearer {KEY}"]


@pytest.mark.parametrize("value", [f"{KEY} {KEY}", f"{KEY}\n{KEY}", f"\u201c{KEY}\u201d"])
def test_what_no_header_can_hold_is_no_key(value: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SERVER_KEY", value)
    fails(lambda: api_key("SERVER_KEY", []), "SERVER_KEY holds spaces or characters beyond ASCII")


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
    assert transport(f"http://{host}:1")["trust_env"] is False
    assert transport("http://10.0.0.1:1")["trust_env"] is True


@pytest.mark.parametrize(
    "url",
    [
        "http://u:SECRET@h",
        "http://u:SEC/RET@h",
        "u:SECRET@h",
        "http://u:SECRET/h",
        "ftp://u:SECRET@h",
    ],
)
def test_a_url_that_is_refused_is_not_shown_if_it_may_hold_a_password(url: str):
    with pytest.raises(UsageError) as caught:
        root_of(url)
    assert not any(part in str(caught.value) for part in ("SEC", "RET"))


@pytest.mark.parametrize("value", ["NaN", "1e999"])
def test_counters_that_are_no_numbers_are_one_line(value: str):
    pytest.importorskip("prometheus_client")
    from paceline.engines.servers import block_counts

    with pytest.raises(EngineError, match="/metrics has vllm:spec_decode_num_drafts_total = "):
        block_counts(f"vllm:spec_decode_num_drafts_total {value}\n", "vllm:")
    with pytest.raises(EngineError, match="more than 4,194,304 characters"):
        block_counts("#" * (4 << 20) + "\n", "vllm:")


def test_a_server_gets_the_users_own_setting_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    setup = Setup("target", None, Capacity(8))
    command = [sys.executable, "-c", "import os; print(os.environ['HF_HUB_OFFLINE'])"]
    given = server_environment(EngineChoice(engine="vllm"), setup)
    with ServerProcess(command, 1, tmp_path / "log", given) as server:
        while not server.last_words():
            pass  # it waits
    assert (tmp_path / "log").read_text() == "0\n"


def test_the_log_replaces_a_link_and_follows_none(tmp_path: Path):
    log, victim = tmp_path / "logs/server.log", tmp_path / "victim"
    victim.write_text("precious")
    log.parent.mkdir()
    log.symlink_to(victim)
    for word in ("first", "second"):
        with ServerProcess([sys.executable, "-c", f"print('{word}')"], 1, log) as server:
            assert word in server.last_words()
    assert not log.is_symlink()
    assert log.read_text() == "second\n"
    assert victim.read_text() == "precious"
