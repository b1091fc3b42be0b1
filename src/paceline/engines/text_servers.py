"""Asks OpenAI-compatible servers for texts: many requests at once, over several servers.

A server that fails gets no requests for a while; its requests go to the others. So servers may
join, leave and restart during a run. Before its first request, and again after a failure, a server
is identified: its program, its model and its tokenizer.
"""

from __future__ import annotations

import asyncio
import contextlib
import operator
import time
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import BaseModel

from paceline.engines.answers import AnswerError
from paceline.engines.client import (
    Client,
    StatusError,
    UnavailableError,
    api_key,
    check_packages,
    connection,
    said_by,
    unreachable,
)
from paceline.engines.kinds import SERVERS
from paceline.engines.servers import Server, served_models
from paceline.engines.texts import (
    KEY_SETTING,
    NEUTRAL_FORMS,
    RefusedError,
    by_status,
    may_pass,
    refused,
)
from paceline.errors import EngineError, SlowerWarning, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from paceline.engines.answers import Written
    from paceline.engines.contract import Request
    from paceline.engines.texts import OpenAIWriter

    OnAnswer = Callable[[int, Written], None]
    Tokenize = Callable[[str], list[int]]

_DAMAGED = 4  # answers to one request that are damaged, before it fails
_PAUSE_S = 1.0  # of a server that fails
_SEEDS = 2**31  # servers keep 32 bits of a seed


class TextServers:
    """Writes texts with the servers of an `OpenAIWriter`."""

    def __init__(self, writer: OpenAIWriter, tokenize: Tokenize) -> None:
        """Read the API key, or raise UsageError.

        `tokenize`: token ids of a text without special tokens, by the tokenizer of the prompts.
        """
        check_packages()
        self._writer = writer
        key = api_key(writer.api_key_env, writer.urls)
        models: dict[str, str] = {}
        self._servers = [_Asked(url, writer, key, tokenize, models) for url in writer.urls]

    def write(self, requests: Sequence[Request], on_answer: OnAnswer) -> None:
        """Answer all requests; `on_answer` gets the index of each and its answer, in any order.

        Raises:
            UsageError: A server refuses the key, the model or a request, or has another tokenizer.
            EngineError: No server answered in time, or answers stay damaged.
        """
        with ThreadPoolExecutor(1, "servers") as thread:
            # not in this thread, into whose event loop Ctrl-C would break in the middle
            stop = _Stop()
            done = thread.submit(asyncio.run, stop.watch(self._write(requests, on_answer)))
            try:
                done.result()
            except BaseException:
                stop()
                raise

    async def _write(self, requests: Sequence[Request], on_answer: OnAnswer) -> None:
        todo: asyncio.Queue[int] = asyncio.Queue()
        for index in range(len(requests)):
            todo.put_nowait(index)
        round_ = _Round(requests, on_answer, todo, Counter())
        self._answered = time.monotonic()
        async with contextlib.AsyncExitStack() as stack:
            for server in self._servers:
                await stack.enter_async_context(server)
            each = [server for _ in range(self._writer.concurrency) for server in self._servers]
            tasks = [asyncio.create_task(self._ask(server, round_)) for server in each]
            tasks.append(asyncio.create_task(todo.join()))
            try:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask(self, server: _Asked, round_: _Round) -> None:
        """Ask this server for one text after the other."""
        while True:
            try:
                await server.identify()
            except UnavailableError as error:
                await self._pause(server, error)
                continue
            index = await round_.todo.get()
            try:
                written = await server.ask(round_.requests[index])
            except (UnavailableError, AnswerError) as error:
                round_.todo.put_nowait(index)
                round_.todo.task_done()
                if isinstance(error, UnavailableError):
                    await self._pause(server, error)
                    continue
                round_.num_damaged[index] += 1
                if round_.num_damaged[index] == _DAMAGED:
                    raise
            else:
                server.is_failing, self._answered = False, time.monotonic()
                round_.on_answer(index, written)
                round_.todo.task_done()

    async def _pause(self, server: _Asked, error: UnavailableError) -> None:
        silent_s = time.monotonic() - self._answered
        if all(each.is_failing for each in self._servers) and silent_s > self._writer.patience_s:
            raise EngineError(f"{error}; no server answered for {silent_s:.0f} s") from error
        if not server.is_failing:
            server.is_failing = True
            warnings.warn(f"{error}; it gets no requests for now", SlowerWarning, stacklevel=2)
        server.forget()
        await asyncio.sleep(_PAUSE_S)


class _Round(NamedTuple):
    """The requests of one call; `num_damaged`: damaged answers by request."""

    requests: Sequence[Request]
    on_answer: OnAnswer
    todo: asyncio.Queue[int]
    num_damaged: Counter[int]


class _Stop:
    """Cancels a coroutine from another thread."""

    def __init__(self) -> None:
        self._cancel: Callable[[], object] | None = None

    async def watch(self, work: Coroutine[None, None, None]) -> None:
        """Do the work, until this object is called."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None, "a coroutine that runs is a task"
        self._cancel = lambda: loop.call_soon_threadsafe(task.cancel)
        await work

    def __call__(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            if self._cancel is not None:
                self._cancel()


class _Known(NamedTuple):
    """What a server is; `name`: its name and version, empty if it gives none."""

    kind: type[Server]
    name: str
    model: str


class _Asked:
    """One server.

    Attributes:
        is_failing: Its last request failed.
    """

    def __init__(
        self,
        url: str,
        writer: OpenAIWriter,
        key: str | None,
        tokenize: Tokenize,
        models: dict[str, str],
    ) -> None:
        self._models = models  # of each server, by URL, which all servers fill in
        self._url = url
        self._writer = writer
        self._key = key
        self._tokenize = tokenize
        self._known: _Known | None = None
        self._form = 0  # of neutral settings
        self.is_failing = False

    async def __aenter__(self) -> _Asked:
        import httpx2

        self._lock = asyncio.Lock()
        settings = connection(self._url, self._key, self._writer.timeout_s)
        self._http = httpx2.AsyncClient(**settings)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    def forget(self) -> None:
        """Identify it again: another server may start at this URL."""
        self._known, self._form = None, 0

    async def identify(self) -> _Known:
        """What the server is.

        Raises:
            UsageError: It refuses the key, has another tokenizer or not the wanted model.
            UnavailableError: It does not answer, or refuses for now.
        """
        async with self._lock:
            if self._known is None:
                given = self._key, self._writer.model, self._tokenize, self._writer.timeout_s
                self._known = await asyncio.to_thread(identify, self._url, *given)
                self._check_model(self._known.model)
            return self._known

    async def ask(self, request: Request) -> Written:
        """Answer a request. Raises AnswerError, if the answer is damaged, and as `identify`."""
        kind, name, model = await self.identify()
        top = self._writer.top_logprobs
        request = request._replace(seed=request.seed % _SEEDS)
        body = kind.text_body(model, request, top)
        post = self._post if kind.recorded_as else self._complete
        answer = await post(kind.text_path, body)
        return kind.read_text(answer, f"{self._url}{kind.text_path}", name, top)

    async def _complete(self, path: str, body: dict[str, Any]) -> str:
        """Send neutral values of settings beyond OpenAI's, in a form that the server accepts."""
        form, last = self._form, len(NEUTRAL_FORMS) - 1
        while True:
            try:
                answer = await self._post(path, NEUTRAL_FORMS[form] | body)
                break
            except RefusedError:
                if form == last:
                    raise
                form += 1
        if form == last > self._form:
            warnings.warn(
                f"{self._url} refuses top_k, min_p and repetition_penalty in requests, so they are "
                "left out; check that it does not take its model's generation_config.json instead",
                stacklevel=2,
            )
        self._form = max(self._form, form)
        return answer

    async def _post(self, path: str, body: dict[str, Any]) -> str:
        import httpx2

        where = f"{self._url}{path}"
        try:
            answer = await self._http.post(path, json=body)
        except httpx2.HTTPError as error:
            advice = ": lower writer.concurrency or raise writer.timeout_s"
            raise UnavailableError(
                unreachable(where, error, self._writer.timeout_s, advice)
            ) from None
        if answer.status_code != 200:
            raise refused(where, answer, self._writer)
        return answer.text

    def _check_model(self, model: str) -> None:
        """Raise UsageError if another server has another model."""
        self._models[self._url] = model
        for url, other in self._models.items():
            if other != model:
                raise UsageError(
                    f"{self._url} serves {model}, and {url} serves {other}; answers of different "
                    "models do not belong together: start the servers with one model and name"
                )


_PROBE = "def f(x):\n    return 'naïve 東京 ½', 12345  # Hello, world!"
"""Text of which servers and tokenizer must give the same ids."""


class _Tokens(BaseModel):
    tokens: list[int]


def identify(
    url: str, key: str | None, wanted: str | None, tokenize: Tokenize, seconds: float
) -> _Known:
    """What the server is; see `_Asked.identify`. `wanted`: its model; None: the only one."""
    client = Client(url, key, key_setting=KEY_SETTING, seconds=seconds)
    try:
        kind, name = _program(client)
        model = _served_model(client, wanted)
        if kind.recorded_as:
            ours = tokenize(_PROBE)
            body = {"model": model, **kind.tokenize_body(_PROBE)}
            got = client.post("/tokenize", body, _Tokens).tokens
            if got != ours:
                first = [*map(operator.eq, got, ours), False].index(False)
                raise UsageError(
                    f"{url} has another tokenizer than the prompts: {len(got)} tokens "
                    f"instead of {len(ours)} for the same text, different from token {first} "
                    "on; set target to a directory with the tokenizer of the served model"
                )
    except StatusError as error:
        raise by_status(str(error), error.status) from None
    except EngineError as error:
        raise UnavailableError(str(error)) from None
    finally:
        client.close()
    return _Known(kind, name, model)


def _program(client: Client) -> tuple[type[Server], str]:
    """The server's class, and its name and version."""
    for kind in SERVERS:
        if not kind.recorded_as:
            continue
        try:
            version = kind.version_of(client)
        except UnavailableError:
            raise
        except EngineError as error:  # it has no such path, or answers otherwise
            if isinstance(error, StatusError) and may_pass(error.status):
                raise
            continue
        if version:
            return kind, f"{kind.recorded_as} {version}"
    return Server, ""


def _served_model(client: Client, wanted: str | None) -> str:
    models = served_models(client)
    shown = said_by(", ".join(models)) or "no model"
    if wanted is None and len(models) == 1:
        return models[0]
    if wanted is None:
        raise UsageError(f"{client.url} serves {shown}; name one model as writer.model")
    if wanted not in models:
        raise UsageError(
            f"{client.url} serves {shown}, not {wanted}; name one that it serves as writer.model"
        )
    return wanted
