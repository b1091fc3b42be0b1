"""Asks OpenAI-compatible servers for texts: many requests at once, over several servers.

A server that does not answer gets its next request after a pause; its requests go to the others. So
servers may join, leave and restart during a run. Before its first request a server is identified:
its program, its model and its tokenizer.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections import Counter
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import BaseModel

from paceline.engines import hidden_states
from paceline.engines.answers import AnswerError
from paceline.engines.client import (
    Client,
    StatusError,
    UnavailableError,
    api_key,
    check_packages,
    said_by,
)
from paceline.engines.kinds import SERVERS
from paceline.engines.servers import Server, served_models
from paceline.errors import EngineError, SlowerWarning, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline.engines.answers import Written
    from paceline.engines.contract import Request
    from paceline.engines.texts import OpenAIWriter

    OnAnswer = Callable[[int, Written], None]
    Tokenize = Callable[[str], list[int]]

_DAMAGED = 4  # answers to one request that are damaged, before it fails
_PAUSE_S = 1.0  # of a server that fails
_SEEDS = 2**31  # servers keep 32 bits of a seed
_NEUTRAL = {"min_p": 0.0, "repetition_penalty": 1.0}
_NEUTRAL_FORMS = (
    {"top_k": -1, **_NEUTRAL},  # SGLang
    {"top_k": 0, **_NEUTRAL, "repeat_penalty": 1.0},  # llama-cpp-python and others
)
"""Settings beyond OpenAI's that a server may take from its model if a request lacks them."""
_PROBE = "def f(x):\n    return 'naïve 東京 ½', 12345  # Hello, world!"
"""Text of which servers and tokenizer must give the same ids."""


class TextServers:
    """Writes texts with the servers of an `OpenAIWriter`."""

    def __init__(self, writer: OpenAIWriter, tokenize: Tokenize) -> None:
        """Read the API key, or raise UsageError.

        `tokenize`: token ids of a text without special tokens, by the tokenizer of the prompts.
        """
        check_packages()
        self._writer = writer
        self._key = api_key(writer.api_key_env, writer.urls)
        self._tokenize = tokenize
        self._failing: set[str] = set()  # URLs of servers whose last request failed
        self._forms = Counter[str]()  # of neutral settings, by the URL of a server
        self._models: list[str] = []  # that the servers served when they were first asked
        self._lock = threading.Lock()

    def write(self, requests: Sequence[Request], on_answer: OnAnswer) -> None:
        """Answer all requests; `on_answer` gets the index of each and its answer, in any order.

        Raises:
            UsageError: A server refuses the key, the model or a request, or has another tokenizer.
            EngineError: No server answered in time, or answers stay damaged.
        """
        writer = self._writer
        servers = [
            _Asked(url, writer, self._key, self._tokenize, self._forms, self._models)
            for url in writer.urls
        ]
        round_ = _Round(requests, servers)
        # Not of a pool, which would wait for requests in flight when Ctrl-C ends the run.
        threads = [
            threading.Thread(target=self._work, args=(server, round_), daemon=True)
            for _ in range(min(writer.concurrency, len(requests)))
            for server in servers
        ]
        try:
            for index in range(len(requests)):
                round_.todo.put(index)
            for thread in threads:
                thread.start()
            for _ in requests:
                found = round_.found.get()
                if isinstance(found, Exception):
                    raise found
                on_answer(*found)
        finally:
            round_.ended.set()
            for _ in threads:
                round_.todo.put(None)
            for server in servers:
                server.client.close()

    def _work(self, server: _Asked, round_: _Round) -> None:
        """Ask this server for one text after the other, until the round ends."""
        try:
            while not round_.ended.is_set():
                self._ask(server, round_)
        except Exception as error:
            round_.found.put(error)

    def _ask(self, server: _Asked, round_: _Round) -> None:
        try:
            server.identify()
        except UnavailableError as error:
            self._pause(server, round_, error)
            return
        index = round_.todo.get()
        if index is None:
            return
        try:
            written = server.ask(round_.requests[index])
        except UnavailableError as error:
            round_.todo.put(index)
            self._pause(server, round_, error)
        except AnswerError:
            round_.num_damaged[index] += 1
            if round_.num_damaged[index] == _DAMAGED:
                raise
            round_.todo.put(index)
        else:
            round_.answered = time.monotonic()
            self._failing.discard(server.url)
            round_.found.put((index, written))

    def _pause(self, server: _Asked, round_: _Round, error: UnavailableError) -> None:
        with self._lock:
            silent_s = time.monotonic() - round_.answered
            if len(self._failing) == len(round_.servers) and silent_s > self._writer.patience_s:
                raise EngineError(f"{error}; no server answered for {silent_s:.0f} s") from error
            if server.url not in self._failing and not round_.ended.is_set():
                self._failing.add(server.url)
                warnings.warn(f"{error}; it gets no requests for now", SlowerWarning, stacklevel=2)
        round_.ended.wait(_PAUSE_S)


@dataclass
class _Round:
    """The requests of one call.

    Attributes:
        todo: Indices of requests; None: the round has ended.
        found: An index and its answer, or the error that ends the round.
        num_damaged: Damaged answers by request.
        answered: Time of the last answer.
    """

    requests: Sequence[Request]
    servers: Sequence[_Asked]
    todo: SimpleQueue[int | None] = field(default_factory=SimpleQueue)
    found: SimpleQueue[tuple[int, Written] | Exception] = field(default_factory=SimpleQueue)
    ended: threading.Event = field(default_factory=threading.Event)
    num_damaged: Counter[int] = field(default_factory=Counter)
    answered: float = field(default_factory=time.monotonic)


class _Known(NamedTuple):
    """What a server is; `name`: its name and version, empty if it gives none."""

    kind: type[Server]
    name: str
    model: str


class _Asked:
    """One server.

    Attributes:
        known: What it is; None: not known yet.
    """

    def __init__(
        self,
        url: str,
        writer: OpenAIWriter,
        key: str | None,
        tokenize: Tokenize,
        forms: Counter[str],
        models: list[str],
    ) -> None:
        self.url = url
        self.known: _Known | None = None
        seconds = writer.timeout_s
        self.client = Client(url, key, key_setting="writer.api_key_env", seconds=seconds)
        self._writer = writer
        self._tokenize = tokenize
        self._lock = threading.Lock()
        self._forms = forms
        self._models = models

    def ask(self, request: Request) -> Written:
        """Answer a request. Raises AnswerError, if the answer is damaged, and as `identify`."""
        kind, name, model = self.identify()
        top = self._writer.top_logprobs
        request = request._replace(seed=request.seed % _SEEDS)
        body, where = kind.text_body(model, request, top), f"{self.url}{kind.text_path}"
        directory = self._writer.states_directory if self._writer.hidden_states else None
        if directory is not None:
            body |= hidden_states.IN_REQUEST
        try:
            answer = self._sent(kind.text_path, body, known=bool(kind.recorded_as))
        except StatusError as error:
            raise UsageError(str(error)) from None
        written = kind.read_text(answer, where, name, top)
        if directory is None:
            return written
        read = (request.prompt, written.tokens or (), directory)
        return written._replace(states=hidden_states.read_states(answer, where, *read))

    def _sent(self, path: str, body: dict[str, Any], *, known: bool) -> str:
        """The answer; a server that is not `known` gets neutral settings as it accepts them."""
        last = len(_NEUTRAL_FORMS)
        for form in range(self._forms[self.url], 0 if known else last):
            try:
                answer = self.client.ask("POST", path, _NEUTRAL_FORMS[form] | body)
            except StatusError as error:
                if error.status not in (400, 422):
                    raise
                continue
            self._forms[self.url] = max(self._forms[self.url], form)
            return answer
        answer = self.client.ask("POST", path, body)
        with self._lock:
            is_first = not known and self._forms[self.url] < last
            self._forms[self.url] = last
        if is_first:
            warnings.warn(
                f"{self.url} refuses top_k, min_p and repetition_penalty in requests, so they are "
                "left out; check that it does not take its model's generation_config.json instead",
                stacklevel=2,
            )
        return answer

    def identify(self) -> _Known:
        """What the server is.

        Raises:
            UsageError: It refuses the key, has another tokenizer or not the wanted model, or
                serves another one than before.
            UnavailableError: It does not answer, or refuses for now.
        """
        with self._lock:
            if self.known is None:
                try:
                    kind, name = self._program()
                    model = self._model()
                    if kind.recorded_as:
                        self._check_tokenizer(kind, model)
                except StatusError as error:
                    raise UsageError(str(error)) from None
                except EngineError as error:
                    raise UnavailableError(str(error)) from None
                self._models.append(model)
                if model != self._models[0]:
                    raise UsageError(
                        f"{self.url} serves {said_by(model)}, and {said_by(self._models[0])} wrote "
                        "the texts before; serve one model, or name it as writer.model"
                    )
                self.known = _Known(kind, name, model)
            return self.known

    def _program(self) -> tuple[type[Server], str]:
        """The server's class, and its name and version."""
        for kind in SERVERS:
            if not kind.recorded_as:
                continue
            try:
                version = kind.version_of(self.client)
            except UnavailableError:
                raise
            except EngineError:  # it has no such path, or answers otherwise
                continue
            if version:
                return kind, f"{kind.recorded_as} {version}"
        return Server, ""

    def _model(self) -> str:
        models, wanted = served_models(self.client), self._writer.model
        if wanted is None and len(models) == 1:
            return models[0]
        if wanted is None or wanted not in models:
            shown = said_by(", ".join(models)) or "no model"
            raise UsageError(f"{self.url} serves {shown}; name one of them as writer.model")
        return wanted

    def _check_tokenizer(self, kind: type[Server], model: str) -> None:
        ours = self._tokenize(_PROBE)
        body = {"model": model, **kind.tokenize_body(_PROBE)}
        got = self.client.post("/tokenize", body, _Tokens).tokens
        if got != ours:
            raise UsageError(
                f"{self.url} has another tokenizer than the prompts: {len(got)} tokens instead of "
                f"{len(ours)} for the same text, or others; set target to a directory with the "
                "tokenizer of the served model"
            )


class _Tokens(BaseModel):
    tokens: list[int]
