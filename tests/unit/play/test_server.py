"""The server of the playground over HTTP: streams, ends, refuses, and survives failing models."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx2
import pytest
import torch

from paceline.core.rules import RULES
from paceline.decode import SpeculativeDecoder
from support.models import tiny_pair
from support.play import peaked_pair, served

ASKED: dict[str, Any] = {"prompt": "the cat", "max_new_tokens": 12, "temperature": 0}


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

    def __init__(self, address: str) -> None:
        self.root = address.removesuffix("/")
        self.http = httpx2.Client(base_url=address, timeout=60)

    @classmethod
    @contextmanager
    def of(cls, pair: Any) -> Iterator["Client"]:
        """A client of the page of a pair, while the block runs."""
        with served(pair) as address:
            client = cls(address)
            with client.http:
                yield client

    def post(self, values: Any, **headers: str) -> httpx2.Response:
        return self.http.post("/decode", json=values, headers=headers)

    def decode(self, **changes: Any) -> Iterator[dict[str, Any]]:
        """The events; ends the connection when it is closed."""
        with self.http.stream("POST", "/decode", json=ASKED | changes) as answer:
            assert answer.status_code == 200, answer.read()
            yield from map(json.loads, answer.iter_lines())


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with Client.of(tiny_pair()) as found:
        yield found


@pytest.fixture(scope="module")
def peaked() -> Any:
    return peaked_pair()


@pytest.fixture(scope="module")
def peaked_client(peaked: Any) -> Iterator[Client]:
    with Client.of(peaked) as found:
        yield found


REJECTED = {"rejected", "unexamined"}


def tokens_of(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [token for event in events[:-1] for token in event["tokens"]]


def test_both_ways_stream_the_text_of_transformers_and_count_it(peaked: Any, peaked_client: Client):
    target = peaked[0]
    tokenizer = target.tokenizer
    ids = torch.tensor([tokenizer("the cat")["input_ids"]])
    made = target.hf.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=2)
    whole = tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True)
    expected = whole.rstrip("\ufffd")  # bytes at the end that are no character
    for plain in (False, True):
        *blocks, end = events = list(peaked_client.decode(plain=plain))
        kept = [token for token in tokens_of(events) if token["source"] not in REJECTED]
        assert end == {"end": True}
        assert "".join(token["text"] for token in kept) == expected
        assert [token["id"] for token in kept] == made[0, ids.shape[1] :].tolist()
        assert blocks[-1]["figures"].startswith("12 tokens in ")
        if not plain:
            sources = [token["source"] for token in kept]
            accepted, examined = sources.count("accepted"), sources.count("recovered")
            said = f"({accepted} of {accepted + examined} examined draft tokens)"
            assert blocks[-1]["figures"].endswith(said)


@pytest.mark.parametrize("temperature", [0, 0.7])
def test_each_token_has_the_probabilities_of_a_pass_over_the_whole_text(
    temperature: float, peaked: Any, peaked_client: Client
):
    tokens = tokens_of(list(peaked_client.decode(temperature=temperature, seed=3)))
    prompt = peaked[0].tokenizer("the cat")["input_ids"]
    kept = [token["id"] for token in tokens if token["source"] not in REJECTED]
    seen = set[str]()
    for name, model in zip(("target", "draft"), peaked, strict=True):
        with torch.no_grad():
            logits = model.hf(torch.tensor([[*prompt, *kept]])).logits[0, len(prompt) - 1 :]
        probs = (logits / (temperature or 1)).softmax(-1)
        place = 0
        for token in tokens:
            seen.add(token["source"])
            if token["source"] == "unexamined":
                assert name not in token
                continue
            assert token[name] == pytest.approx(float(probs[place, token["id"]]), abs=1e-4)
            place += token["source"] != "rejected"
    assert seen >= {"rejected", "recovered", "accepted", "unexamined"}


def test_rejected_tokens_are_those_that_the_draft_proposed(peaked: Any, peaked_client: Client):
    tokens = tokens_of(list(peaked_client.decode(num_speculative_tokens=3)))
    prompt = peaked[0].tokenizer("the cat")["input_ids"]
    for block in SpeculativeDecoder(*peaked, gamma=3).stream(prompt, 4, 0):
        assert len(block.rejected) == block.num_drafted - block.sources.count("accepted")
    kept: list[int] = []
    for token in tokens:
        if token["source"] == "rejected":
            with torch.no_grad():
                logits = peaked[1].hf(torch.tensor([[*prompt, *kept]])).logits[0, -1]
            assert token["id"] == int(logits.argmax())
        elif token["source"] != "unexamined":
            kept.append(token["id"])
    assert "rejected" in {token["source"] for token in tokens}


def test_a_draft_with_a_shorter_context_has_no_probabilities_beyond_it(peaked: Any):
    short = peaked_pair(max_position_embeddings=16)[1]
    with Client.of((peaked[0], short)) as client:
        *blocks, end = client.decode(max_new_tokens=30)
    assert end == {"end": True}
    assert "draft" in blocks[0]["tokens"][0]
    assert {*blocks[-1]["tokens"][-1]} == {"id", "text", "source", "target"}


def test_settings_have_every_rule_with_its_own_parameters(client: Client):
    rules = client.http.get("/settings").json()["rules"]
    assert len(rules) == len(RULES)
    (opt,) = [one for one in rules if one["rule"] == "opt"]
    assert opt["settings"] == {"alpha": 0.4}
    assert "TVD" in opt["about"]
    for one in rules:
        *_, last = client.decode(rule={"rule": one["rule"], **one["settings"]}, temperature=1)
        assert last == {"end": True}


def test_texts_of_two_browsers_are_decoded_in_turn(client: Client):
    alone = list(client.decode())
    first, second = client.decode(), client.decode()
    assert next(first)["tokens"] == alone[0]["tokens"]
    assert tokens_of(list(second)) == tokens_of(alone)
    assert tokens_of([{"tokens": []}, *first]) == tokens_of(alone)[1:]


def test_decoding_ends_when_the_browser_leaves_and_the_next_request_is_served():
    pair = tiny_pair()
    gate = Gate(pair[0])
    with Client.of(pair) as client:
        gate.is_open.release(4)
        events = client.decode(max_new_tokens=50)
        next(events)
        assert gate.waits.wait(60)
        events.close()
        for _ in range(200):  # enough for the whole text, were it decoded
            gate.is_open.release()
        after = list(client.decode(max_new_tokens=2, plain=True))
    assert after[-1] == {"end": True}
    assert gate.passes < 20


def test_a_model_that_fails_says_so_and_the_server_goes_on():
    pair = tiny_pair()
    gate = Gate(pair[0], RuntimeError("no memory left\nat layer 3"))
    with Client.of(pair) as client:
        *_, last = client.decode()
        assert last == {"error": "the model failed: RuntimeError: no memory left"}
        gate.passes = 4
        assert list(client.decode())[-1] == {"end": True}


@pytest.mark.parametrize(
    ("changes", "status", "said"),
    [
        ({"prompt": ""}, 422, "prompt"),
        ({"max_new_tokens": 0}, 422, "max_new_tokens"),
        ({"rule": {"rule": "opt"}}, 422, "alpha"),
        ({"rule": {"import": "os:getcwd"}}, 422, "rule"),
        ({"seed": float("1e999")}, 422, "seed"),
        ({"colour": "red"}, 422, "colour: unknown key"),
        ({"chat": True}, 200, "no chat template"),  # the only event
        ({"prompt": "a" * 3000}, 200, "shorten the prompt"),
    ],
)
def test_a_request_that_is_invalid_is_refused_in_one_line(
    client: Client, changes: dict[str, Any], status: int, said: str
):
    text = json.dumps(ASKED | changes)
    kind = {"content-type": "application/json"}
    answer = client.http.post("/decode", content=text, headers=kind)
    assert answer.status_code == status
    assert said in answer.json()["error"]
    assert "\n" not in answer.json()["error"]


@pytest.mark.parametrize("body", ["", "[]", "{", '{"seed": NaN}', "[" * 100_000, "a" * 2_000_000])
def test_a_body_that_is_no_object_is_refused(client: Client, body: str):
    kind = {"content-type": "application/json"}
    assert client.http.post("/decode", content=body, headers=kind).status_code == 422


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "", "[::", "0.0.0.0", "evil@localhost"]
)
@pytest.mark.parametrize("path", ["/", "/settings"])
def test_another_host_is_refused(client: Client, host: str, path: str):
    assert client.http.get(path, headers={"host": host}).status_code == 403
    assert client.post(ASKED, host=host).status_code == 403


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:1"])
def test_a_request_of_another_page_is_refused(client: Client, origin: str):
    assert client.post(ASKED, origin=origin).status_code == 403
    assert client.post(ASKED | {"max_new_tokens": 1}, origin=client.root).status_code == 200
    as_form = client.http.post("/decode", content="{}", headers={"content-type": "text/plain"})
    assert as_form.status_code == 415


def test_every_answer_forbids_other_sources_and_frames_and_names_no_other_server(client: Client):
    assert client.root.startswith("http://127.0.0.1:"), "only this machine is listened to"
    for path in ("/", "/play.css", "/play.js", "/settings", "/nowhere"):
        answer = client.http.get(path)
        headers = answer.headers
        assert path == "/settings" or "//" not in answer.text.replace("// ", "")
        assert headers["content-security-policy"].startswith(
            "default-src 'none'; script-src 'self'"
        )
        assert headers["x-content-type-options"] == "nosniff"
