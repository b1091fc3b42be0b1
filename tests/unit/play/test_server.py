"""The server of the playground over HTTP: streams, stops, refuses, and survives failing models."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx2
import pytest
import torch

from paceline.play.server import Listening
from support.models import tiny_pair
from support.play import peaked_pair, served

ASKED: dict[str, Any] = {
    "prompt": "the cat",
    "max_new_tokens": 12,
    "sampling": {"temperature": 0},
    "plain": True,
}


class Gate:
    """Lets a model make this many passes, then waits, or fails if `error` is set."""

    def __init__(self, model: Any, error: Exception | None = None) -> None:
        self.passes, self.error = 0, error
        self.is_open = threading.Semaphore(0)
        self.waits = threading.Event()
        model.hf.register_forward_pre_hook(self)

    def __call__(self, *_: Any) -> None:
        if self.error is not None and self.passes == 3:
            raise self.error
        if self.error is None and not self.is_open.acquire(blocking=False):
            self.waits.set()
            assert self.is_open.acquire(timeout=60)
        self.passes += 1


class Client:
    """A browser of the page at an address."""

    def __init__(self, listening: Listening) -> None:
        self.root, _, fragment = listening.address.partition("#")
        self.token = fragment.removeprefix("token=")
        self.http = httpx2.Client(base_url=self.root, timeout=60)

    @classmethod
    @contextmanager
    def of(cls, pair: Any, *host: str) -> Iterator["Client"]:
        """A client of the page of a pair, while the block runs."""
        with served(pair, *host) as listening:
            client = cls(listening)
            with client.http:
                yield client

    def post(self, path: str, values: Any, **headers: str) -> httpx2.Response:
        return self.http.post(path, json=values, headers=headers)

    def decode(self, **changes: Any) -> Iterator[dict[str, Any]]:
        """The events; ends the connection when it is closed."""
        with self.http.stream("POST", "/api/decode", json=ASKED | changes) as answer:
            assert answer.status_code == 200, answer.read()
            for line in answer.iter_lines():
                if line:
                    yield json.loads(line.removeprefix("data: "))


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with Client.of(tiny_pair()) as found:
        yield found


@pytest.fixture
def gated() -> Iterator[tuple[Client, Gate]]:
    """A client, and the gate of its target."""
    pair = tiny_pair()
    gate = Gate(pair[0])
    with Client.of(pair) as found:
        yield found, gate
        for _ in range(100):
            gate.is_open.release()


def text_of(events: list[dict[str, Any]], way: str) -> str:
    blocks = [event for event in events if event["kind"] == "block" and event["way"] == way]
    return "".join(text for block in blocks for text, _ in block["pieces"])


def test_both_ways_stream_the_text_of_transformers_and_count_it():
    target, draft = peaked_pair()
    tokenizer = target.tokenizer
    assert tokenizer is not None
    ids = torch.tensor([tokenizer("the cat")["input_ids"]])
    made = target.hf.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=2)
    whole = tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True)
    expected = whole.rstrip("\ufffd")  # bytes at the end that are no character
    with Client.of((target, draft)) as client:
        events = list(client.decode())
    assert [text_of(events, way) for way in ("draft", "plain")] == [expected] * 2
    assert (events[0]["kind"], events[0]["ways"]) == ("begin", ["draft", "plain"])
    for way in ("draft", "plain"):
        *blocks, end = [event for event in events if event.get("way") == way]
        sources = [source for block in blocks for _, source in block["pieces"]]
        assert end == {"kind": "end", "reason": "length", "way": way}
        figures = blocks[-1]["figures"]
        assert figures["tokens"] == len(sources) == 12
        assert figures["tokens_per_s"] == pytest.approx(12 / figures["seconds"])
        if way == "draft":
            accepted, examined = sources.count("accepted"), sources.count("recovered")
            assert figures["acceptance_rate"] == accepted / (accepted + examined)


def test_settings_describe_every_rule_with_its_own_parameters(client: Client):
    schema = client.http.get("/api/settings").json()["request"]
    opt = schema["$defs"]["Opt"]
    assert opt["properties"]["alpha"]["type"] == "number"
    assert opt["properties"]["alpha"]["description"] == "alpha of Opt"
    assert {"alpha": 0.2} in opt["examples"]
    assert "TVD" in opt["description"]


def test_a_stop_ends_both_texts_after_their_block(gated: tuple[Client, Gate]):
    client, gate = gated
    events = client.decode(max_new_tokens=50)
    run = next(events)["run"]
    assert gate.waits.wait(60)
    assert client.post("/api/stop", {"run": "another"}).json() == {"stopped": False}
    assert client.post("/api/stop", {"run": run}).json() == {"stopped": True}
    gate.is_open.release()
    rest = list(events)
    assert [event["reason"] for event in rest if event["kind"] == "end"] == ["stopped"] * 2
    assert gate.passes == 1


def test_a_second_request_is_told_that_the_models_are_busy(gated: tuple[Client, Gate]):
    client, gate = gated
    events = client.decode(max_new_tokens=50)
    next(events)
    answer = client.post("/api/decode", ASKED)
    assert (answer.status_code, answer.json()["error"][:5]) == (409, "busy:")
    events.close()
    gate.is_open.release()


def test_decoding_ends_when_the_browser_leaves_and_the_next_request_is_served(
    gated: tuple[Client, Gate],
):
    client, gate = gated
    events = client.decode(max_new_tokens=50)
    next(events)
    assert gate.waits.wait(60)
    events.close()
    while client.post("/api/decode", ASKED | {"prompt": ""}).status_code == 409:
        pass
    for _ in range(60):  # enough for the whole text, were it decoded
        gate.is_open.release()
    after = list(client.decode(max_new_tokens=2, plain=False))
    assert after[-1]["kind"] == "end"
    assert gate.passes < 10


def test_a_model_that_fails_says_so_and_the_server_goes_on():
    pair = tiny_pair()
    gate = Gate(pair[0], RuntimeError("no memory left\nat layer 3"))
    with Client.of(pair) as client:
        *_, last = client.decode()
        assert last == {
            "kind": "error",
            "message": "the model failed: RuntimeError: no memory left",
        }
        gate.passes = 4
        assert list(client.decode())[-1]["kind"] == "end"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"prompt": ""}, "prompt"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"rule": {"rule": "opt"}}, "alpha"),
        ({"rule": {"import": "os:getcwd"}}, "rule"),
        ({"chat": True}, "no chat template"),
        ({"prompt": "a" * 3000}, "shorten the prompt"),
        ({"colour": "red"}, "colour: unknown key"),
        ({"prompt": "a" * 2_000_000}, "larger than"),
    ],
)
def test_a_request_that_cannot_be_decoded_is_refused_in_one_line(
    client: Client, changes: dict[str, Any], said: str
):
    answer = client.post("/api/decode", ASKED | changes)
    assert answer.status_code == 422
    assert said in answer.json()["error"]
    assert "\n" not in answer.json()["error"]


@pytest.mark.parametrize("body", ["", "[]", "{", '{"seed": NaN}', "[" * 100_000])
def test_a_body_that_is_no_object_is_refused(client: Client, body: str):
    kind = {"content-type": "application/json"}
    assert client.http.post("/api/decode", content=body, headers=kind).status_code == 422


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "", "[::", "0.0.0.0"])
@pytest.mark.parametrize("path", ["/", "/api/settings"])
def test_another_host_is_refused(client: Client, host: str, path: str):
    assert client.http.get(path, headers={"host": host}).status_code == 403


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:1"])
def test_a_request_of_another_page_is_refused(client: Client, origin: str):
    assert client.post("/api/decode", ASKED, origin=origin).status_code == 403
    own = client.root.removesuffix("/")
    assert client.post("/api/stop", {"run": ""}, origin=own).status_code == 200
    as_form = client.http.post("/api/decode", content="{}", headers={"content-type": "text/plain"})
    assert as_form.status_code == 415


def test_a_server_that_others_reach_wants_its_token():
    with Client.of(tiny_pair(), "0.0.0.0") as client:
        assert len(client.token) >= 32
        for given in ("", "Bearer", f"Bearer {client.token}x", client.token, "Bearer é"):
            headers = {"authorization": given.encode()}
            assert client.http.get("/api/settings", headers=headers).status_code == 401
        right = {"authorization": f"Bearer {client.token}", "host": "any.example"}
        assert client.http.get("/api/settings", headers=right).status_code == 200
        assert client.post("/api/decode", ASKED).status_code == 401
        assert client.http.get("/").status_code == 200


def test_every_answer_forbids_other_sources_and_frames(client: Client):
    for path in ("/", "/play.js", "/api/settings", "/nowhere"):
        headers = client.http.get(path).headers
        assert headers["content-security-policy"].startswith(
            "default-src 'none'; script-src 'self'"
        )
        assert headers["x-content-type-options"] == "nosniff"
