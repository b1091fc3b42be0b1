"""Asks OpenAI-compatible servers for texts: many requests at once, over several servers.

A server that fails gets no requests for a while; its requests go to the others. So servers may
join, leave and restart during a run.

Before the first request, a server is identified: its program, its model and its tokenizer. Its log
probabilities must be the target's, before temperature and filters. vLLM with `--logprobs-mode
processed_logprobs` gives those of the distribution that it samples from, and a draft that is
trained on them learns another distribution than the one that it is compared with.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import math
import operator
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from paceline.core.sampling import SamplingParams
from paceline.engines.client import (
    UNCOMPRESSED,
    Client,
    StatusError,
    UnavailableError,
    api_key,
    drop_other_headers,
    limiting,
    shorten,
    timeouts,
    transport,
    unreachable,
)
from paceline.engines.kinds import KINDS, text_form
from paceline.engines.servers import served_models
from paceline.engines.texts import (
    KEY_SETTING,
    NEUTRAL_FORMS,
    AnswerError,
    RefusedError,
    Written,
    by_status,
    may_pass,
    processed,
    read_answer,
    refused,
    text_body,
)
from paceline.errors import EngineError, SlowerWarning, UsageError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Sequence

    import httpx2

    from paceline.engines.contract import Request
    from paceline.engines.texts import OpenAIWriter

    OnAnswer = Callable[[int, Written], None]
    Tokenize = Callable[[str], list[int]]
    Write = Callable[[Request], Awaitable[Written]]

_RETRIES = 2  # by the client, with back-off, before a server counts as failing
_DAMAGED = 4  # answers to one request that are damaged, before it fails
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0


class TextServers:
    """Writes texts with the servers of an `OpenAIWriter`."""

    def __init__(self, writer: OpenAIWriter, tokenize: Tokenize) -> None:
        """Read the API key.

        Args:
            writer: The servers.
            tokenize: Token ids of a text without special tokens, by the tokenizer of the prompts.

        Raises:
            UsageError: The client's package or the key's variable is missing.
        """
        if importlib.util.find_spec("openai") is None:
            raise UsageError("writer openai needs the client: pip install -e '.[engines]'")
        self._writer = writer
        self._key = api_key(writer.api_key_env, writer.urls)
        models: dict[str, str] = {}
        self._servers = [_Server(url, writer, self._key, tokenize, models) for url in writer.urls]

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
        pool = _Pool(self._servers, self._writer)

        async def answer(index: int) -> None:
            on_answer(index, await pool.ask(requests[index]))

        async with contextlib.AsyncExitStack() as stack:
            for server in self._servers:
                await stack.enter_async_context(server)
            tasks = [asyncio.create_task(answer(index)) for index in range(len(requests))]
            try:
                for task in asyncio.as_completed(tasks):
                    await task
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)


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


class _Pool:
    """Gives each request to the least busy server that answers."""

    def __init__(self, servers: Sequence[_Server], writer: OpenAIWriter) -> None:
        self._servers = servers
        self._limit = writer.concurrency
        self._patience_s = writer.patience_s
        self._changed = asyncio.Condition()
        self._answered = time.monotonic()

    async def ask(self, request: Request) -> Written:
        num_damaged = 0
        while True:
            server = await self._acquire()
            try:
                written = await server.ask(request)
            except UnavailableError as error:
                self._pause(server, error)
            except AnswerError:
                num_damaged += 1
                if num_damaged == _DAMAGED:
                    raise
            else:
                server.pause_s, server.is_reported = 0.0, False
                self._answered = time.monotonic()
                return written
            finally:
                server.num_busy -= 1
                async with self._changed:
                    self._changed.notify_all()

    async def _acquire(self) -> _Server:
        async with self._changed:
            while True:
                now = time.monotonic()
                ready = [each for each in self._servers if each.resumes_at <= now]
                free = [each for each in ready if each.num_busy < self._limit_of(each)]
                if free:
                    server = min(free, key=lambda each: each.num_busy)
                    server.num_busy += 1
                    return server
                resting = [each.resumes_at - now for each in self._servers if each not in ready]
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), min(resting, default=None))

    def _limit_of(self, server: _Server) -> int:
        """One request tests whether a server answers again."""
        return 1 if server.pause_s else self._limit

    def _pause(self, server: _Server, error: UnavailableError) -> None:
        now = time.monotonic()
        if server.resumes_at > now:  # another request has found the same failure
            return
        if all(each.pause_s for each in self._servers) and now - self._answered > self._patience_s:
            raise EngineError(
                f"{error}; no server answered for {now - self._answered:.0f} s"
            ) from error
        if not server.is_reported:
            server.is_reported = True
            warnings.warn(f"{error}; it gets no requests for now", SlowerWarning, stacklevel=2)
        server.pause_s = min(max(2 * server.pause_s, _FIRST_PAUSE_S), _LONGEST_PAUSE_S)
        server.resumes_at = now + server.pause_s
        server.forget()


class _Server:
    """One server.

    Attributes:
        num_busy: Requests in flight.
        pause_s: Length of the last pause after failures; 0: the last request was answered.
        resumes_at: End of the pause, by the monotonic clock.
        is_reported: A warning said that it fails.
    """

    def __init__(
        self,
        url: str,
        writer: OpenAIWriter,
        key: str | None,
        tokenize: Tokenize,
        models: dict[str, str],
    ) -> None:
        """`models`: the model of each server, by URL, which all servers fill in."""
        self._models = models
        self._url = url
        self._writer = writer
        self._key = key
        self._tokenize = tokenize
        self._known: tuple[str, str] | None = None  # model, name and version
        self._form = 0  # of neutral settings
        self._is_raw = not writer.top_logprobs  # log probabilities are the target's, or not needed
        self.is_reported = False
        self.num_busy, self.pause_s, self.resumes_at = 0, 0.0, 0.0

    async def __aenter__(self) -> _Server:
        import openai

        self._lock = asyncio.Lock()
        self.num_busy = 0
        limit = limiting(self._writer.timeout_s)

        async def limit_answer(answer: httpx2.Response) -> None:
            limit(answer)

        self._client = openai.AsyncOpenAI(
            base_url=f"{self._url}/v1",
            api_key=self._key or "none",
            timeout=timeouts(self._writer.timeout_s),
            max_retries=_RETRIES,
            default_headers=UNCOMPRESSED,
            http_client=openai.DefaultAsyncHttpxClient(
                **transport(self._url),
                follow_redirects=False,  # the key is for this server
                event_hooks={"request": [drop_other_headers], "response": [limit_answer]},
            ),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()

    def forget(self) -> None:
        """Check everything again: another server may start at this URL."""
        self._known, self._form, self._is_raw = None, 0, not self._writer.top_logprobs

    async def ask(self, request: Request) -> Written:
        """Answer a request.

        Raises:
            UsageError: The server refuses the key, the model or the request, or its log
                probabilities are not those of the target.
            AnswerError: The answer is damaged.
            UnavailableError: The server does not answer, or refuses for now.
        """
        async with self._lock:
            if self.resumes_at > time.monotonic():
                raise UnavailableError(f"{self._url} failed while this request waited for it")
            if self._known is None:
                given = self._key, self._writer.model, self._tokenize, self._writer.timeout_s
                self._known = await asyncio.to_thread(identify, self._url, *given)
                self._check_model(self._known[0])
            known = self._known
            if not self._is_raw:
                checked = await gives_unprocessed(partial(self._written, known), request, self._url)
                self._is_raw = checked and self._known is known  # not forgotten meanwhile
        return await self._written(known, request)

    async def _written(self, known: tuple[str, str], request: Request) -> Written:
        (model, name), top = known, self._writer.top_logprobs
        path, body = text_body(request, top, model=model, server=name)
        where = f"{self._url}{path}"
        post = self._complete if text_form(name) is None else self._post
        return read_answer(path, await post(where, body), where, name, top)

    async def _complete(self, where: str, body: dict[str, Any]) -> str:
        """Send neutral values of settings beyond OpenAI's, in a form that the server accepts."""
        form, last = self._form, len(NEUTRAL_FORMS) - 1
        while True:
            try:
                answer = await self._post(where, NEUTRAL_FORMS[form] | body)
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

    async def _post(self, where: str, body: dict[str, Any]) -> str:
        import httpx2
        import openai

        try:
            answer = await self._client.post(where, cast_to=httpx2.Response, body=body)
        except openai.APIStatusError as error:
            raise refused(where, error.response, self._writer) from None
        except openai.APIConnectionError as error:
            cause, seconds = error.__cause__ or error, self._writer.timeout_s
            advice = ": lower writer.concurrency or raise writer.timeout_s"
            raise UnavailableError(unreachable(where, cause, seconds, advice)) from None
        except UnavailableError:
            raise
        except EngineError as error:  # too long, or compressed
            raise AnswerError(str(error)) from None
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
) -> tuple[str, str]:
    """The model's name, and the server's name and version.

    Args:
        url: The server's root.
        key: API key; None: the server needs none.
        wanted: Name of the model; None: the only one that the server serves.
        tokenize: Token ids of a text without special tokens, which must be the server's.
        seconds: Timeout of each request.

    Raises:
        UsageError: It does not serve this model, has another tokenizer, or refuses the key.
        UnavailableError: It does not answer, or refuses for now.
    """
    client = Client(url, key, key_setting=KEY_SETTING, seconds=seconds)
    try:
        name, tokenizing = _program(client)
        model = _served_model(client, wanted)
        if tokenizing is not None:
            ours = tokenize(_PROBE)
            got = client.post("/tokenize", {"model": model, **tokenizing}, _Tokens).tokens
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
    return model, name


def _program(client: Client) -> tuple[str, dict[str, Any] | None]:
    """Name and version, and the body of a request that tokenizes the probe."""
    for form in (kind.texts for kind in KINDS.values() if kind.texts is not None):
        try:
            (value,) = client.get(*form.version).model_dump().values()
        except UnavailableError:
            raise
        except EngineError as error:  # it has no such path, or answers otherwise
            if isinstance(error, StatusError) and may_pass(error.status):
                raise
            continue
        if value:
            return f"{form.program} {value}", form.tokenize(_PROBE)
    return "", None


def _served_model(client: Client, wanted: str | None) -> str:
    models = served_models(client)
    shown = shorten(", ".join(models)) or "no model"
    if wanted is None and len(models) == 1:
        return models[0]
    if wanted is None:
        raise UsageError(f"{client.url} serves {shown}; name one model as writer.model")
    if wanted not in models:
        raise UsageError(
            f"{client.url} serves {shown}, not {wanted}; name one that it serves as writer.model"
        )
    return wanted


_PLAIN = SamplingParams()
_COLD = 0.1  # temperature
_SHARP_FORMS = (
    SamplingParams(temperature=_COLD, top_k=1, top_p=0.01),
    SamplingParams(temperature=_COLD, top_p=0.01),
    SamplingParams(temperature=_COLD),
)
"""Settings to compare with `_PLAIN`: the first that the server accepts."""

TOLERANCE = 0.5
"""Largest difference of equal log probabilities, in nats.

Logits of 16 to 32 have steps of 0.125 in bfloat16, and kernels that add in another order, as for
another number of requests, move them by one or two steps. Temperature 0.1 multiplies all
differences of log probabilities by ten, and filters remove all tokens but one.
"""


async def gives_unprocessed(write: Write, request: Request, where: str) -> bool:
    """True if a server's log probabilities depend on no sampling setting; False if it is not clear.

    Compares those of one token at temperature 1 and at a low temperature with narrow filters. It is
    not clear behind a prompt for whose next token the server has no log probabilities, or the same
    ones at any temperature; then a part of the prompt is used instead.

    Raises:
        UsageError: They depend on the sampling settings.
    Cost: two requests for one token, and two more for each prompt that is not clear.
    """
    length = len(request.prompt)
    while length:
        context = request._replace(prompt=request.prompt[:length], max_new_tokens=1)
        plain = await _scores(write, context, _PLAIN)
        if _is_telling(plain):
            sharp = await _sharp_scores(write, context)
            if sharp and not _are_equal(plain, sharp):
                shown = [", ".join(f"{value:.3g}" for value in row[:3]) for row in (plain, sharp)]
                raise processed(where, f"{shown[0]} became {shown[1]} at temperature {_COLD}")
            if sharp:
                return True
        length //= 2
    return False


async def _sharp_scores(write: Write, request: Request) -> list[float]:
    for sampling in _SHARP_FORMS[:-1]:
        with contextlib.suppress(RefusedError):
            return await _scores(write, request, sampling)
    return await _scores(write, request, _SHARP_FORMS[-1])


async def _scores(write: Write, request: Request, sampling: SamplingParams) -> list[float]:
    """Log probabilities of the most likely first tokens, descending; none if there are none."""
    written = await write(request._replace(sampling=sampling))
    return [value for _, value in written.top[0]] if written.top else []


def _is_telling(plain: Sequence[float]) -> bool:
    """True if a temperature or a filter would change these by more than the tolerance."""
    if len(plain) < 2:
        return bool(plain) and plain[0] < -2 * TOLERANCE  # would become 0
    return (plain[0] - plain[-1]) * (1 / _COLD - 1) > 2 * TOLERANCE


def _are_equal(plain: Sequence[float], sharp: Sequence[float]) -> bool:
    """Compares values in order, since tokens of like probability may change places."""
    return all(
        math.isclose(one, other, rel_tol=0, abs_tol=TOLERANCE)
        for one, other in zip_longest(plain, sharp, fillvalue=math.nan)
    )
