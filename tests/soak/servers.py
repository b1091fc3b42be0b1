"""Servers that stall, reset, truncate and lie: every request is answered once, and rightly.

    PYTHONPATH=tests .venv/bin/python -m soak.servers --count 10000

Two servers answer by a formula of the prompt, so that every record can be checked. One answer in
ten is a fault. The model changes once in the middle: the command must refuse to go on, and goes on
when the model is back. Faults that end the command are counted; the same command continues.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
import socket
import tempfile
import threading
import time
import warnings
from collections import Counter
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.data.distillation_data import generate_data
from paceline.engines import text_servers
from paceline.errors import PacelineError
from paceline.models.loading import load_tokenizer
from paceline.models.token_text import tokens_of
from support.data import answers, generation, write_lines
from support.runs import write_pair

if TYPE_CHECKING:
    from collections.abc import Callable

FAULTS = (
    *("stall", "reset", "half a header", "truncated", "no json", "no choice", "too many tokens"),
    *("503", "429", "500 html", "few log probabilities", "late"),
)
VOCABULARY, NEW, SHARE = 266, 8, 0.1


def text_of(prompt: list[int]) -> list[int]:
    """The tokens of an answer, none of which ends it."""
    digest = hashlib.sha256(str(prompt).encode()).digest()
    return [3 + byte % (VOCABULARY - 3) for byte in digest[:NEW]]


class Liar(ThreadingHTTPServer):
    """A server like vLLM; `model` is what it serves now."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, seed: int, tokenize: Callable[[str], list[int]]) -> None:
        super().__init__(("127.0.0.1", 0), Answering)
        self.tokenize = tokenize
        self.rng, self.lock, self.model = random.Random(seed), threading.Lock(), "served"
        self.faults, self.in_flight, self.most = Counter[str](), 0, 0
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    def fault(self) -> str:
        with self.lock:
            name = self.rng.choice(FAULTS) if self.rng.random() < SHARE else ""
            self.faults[name or "none"] += 1
            return name

    def handle_error(self, request: Any, client_address: Any) -> None:
        del request, client_address  # clients that gave up


class Answering(BaseHTTPRequestHandler):
    """Answers of `Liar`."""

    server: Any
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        del format, args

    def do_GET(self) -> None:
        pages = {
            "/version": {"version": "0.32.0"},
            "/v1/models": {"data": [{"id": self.server.model}]},
        }
        found = pages.get(self.path)
        self.send(200 if found else 404, json.dumps(found or {}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            self.send(200, json.dumps({"tokens": self.server.tokenize(body["prompt"])}))
            return
        if self.path != "/v1/completions":
            self.send(404, "{}")
            return
        if body["model"] != self.server.model:
            self.send(404, json.dumps({"error": {"message": "no such model"}}))
            return
        with self.server.lock:
            self.server.in_flight += 1
            self.server.most = max(self.server.most, self.server.in_flight)
        try:
            self.complete(body)
        finally:
            with self.server.lock:
                self.server.in_flight -= 1

    def complete(self, body: dict[str, Any]) -> None:
        tokens, fault = text_of(body["prompt"]), self.server.fault()
        time.sleep(0.01 if fault != "late" else 0.8)
        match fault:
            case "stall":
                time.sleep(3)
                return
            case "reset":
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0" * 2)
                self.close_connection = True
                self.connection.close()
                return
            case "half a header":
                self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Le")
                self.close_connection = True
                return
            case "503" | "429":
                self.send(int(fault), "busy")
                return
            case "500 html":
                self.send(500, "<html>proxy</html>")
                return
            case "too many tokens":
                tokens = tokens * 3
            case _:
                pass
        rows = [{f"token_id:{token}": -0.5, "token_id:1": -1.0} for token in tokens]
        rows = rows[:3] if fault == "few log probabilities" else rows
        choice = {"text": "x", "finish_reason": "length", "token_ids": tokens}
        choice |= {"logprobs": {"top_logprobs": rows}}
        found = json.dumps({"choices": [] if fault == "no choice" else [choice]})
        if fault == "truncated":
            self.send(200, found[: len(found) // 2], len(found))
            self.close_connection = True
            return
        self.send(200, "{]" if fault == "no json" else found)

    def send(self, status: int, text: str, length: int | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(length or len(text)))
        self.end_headers()
        self.wfile.write(text.encode())


def soak(count: int, folder: Path) -> Counter[str]:
    """All requests, with 64 in flight. -> faults by name, and starts of the command."""
    text_servers._PAUSE_S = 0.05  # pyright: ignore
    write_pair(folder)
    write_lines(folder / "prompts.jsonl", *[{"prompt": f"number {n}"} for n in range(count)])
    tokenizer = load_tokenizer(folder / "target")
    tokenize = partial(tokens_of, tokenizer=tokenizer)
    servers = [Liar(1, tokenize), Liar(2, tokenize)]
    urls = [f"http://127.0.0.1:{server.server_port}" for server in servers]
    writer = {"kind": "openai", "url": urls, "concurrency": 32, "top_logprobs": 2}
    writer |= {"timeout_s": 2.0, "patience_s": 1.0}
    changes = {"temperatures": [1], "num_per_prompt": 1, "shard_size": 256, "writer": writer}
    config = generation(folder, folder / "out", max_new_tokens=NEW, max_prompt_tokens=16, **changes)
    starts, several_lines, errors, changed = 0, 0, Counter[str](), False

    def progress(stage: str, done: float, total: float, note: str = "") -> None:
        nonlocal changed
        del stage, note
        print(f"\r{done:,.0f} of {total:,.0f}, {starts} starts", end="", flush=True)  # noqa: T201
        if not changed and done > total / 2:
            changed = True
            for server in servers:
                server.model = "another"

    while True:
        starts += 1
        try:
            generate_data(config, resume=True, progress=progress)
        except PacelineError as error:
            said = str(error)
            several_lines += "\n" in said
            errors[f"{type(error).__name__}: {re.sub('[0-9.:]{9,}', '', said)}"] += 1
            for server in servers:
                server.model = "served"
            assert starts < 30, errors
        else:
            break
    assert not several_lines, errors
    records = answers(folder / "out")
    assert len(records) == len({one.id for one in records}) == count
    for one in records:
        wanted = text_of(one.prompt_tokens)  # a longer answer is taken as it is
        assert one.completion_tokens in (wanted, 3 * wanted), (one.id, one.completion_tokens)
        assert one.top_tokens is not None
        assert [row[0] for row in one.top_tokens] == one.completion_tokens, one.id
    assert any("another" in text or "model" in text for text in errors), errors
    total = sum((server.faults for server in servers), Counter[str]())
    total |= Counter({"starts": starts, "most in flight": sum(one.most for one in servers)})
    return total | errors


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as place:
        print("\n", dict(soak(parser.parse_args().count, Path(place) / "pair")))  # noqa: T201
