"""Asks OpenAI-compatible servers for texts: many requests at once, over several servers.

A server that fails gets no requests for a while; its requests go to the others. So servers may
join, leave and restart during a run.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

from paceline.engines.client import api_key, certificates, is_loopback, shorten
from paceline.engines.server_identity import identify
from paceline.engines.text_answers import (
    AnswerError,
    Written,
    read_completion,
    read_llama_completion,
)
from paceline.engines.text_errors import RefusedError, UnavailableError, refusal
from paceline.engines.text_requests import NEUTRAL_FORMS, llama_body, openai_body
from paceline.engines.unprocessed_scores import gives_unprocessed
from paceline.errors import EngineError, SlowerWarning, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from paceline.engines.contract import Request
    from paceline.engines.server_identity import Tokenize
    from paceline.engines.text_config import OpenAIWriter

    OnAnswer = Callable[[int, Written], None]

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
        if all(each.pause_s for each in self._servers) and now - self._answered > self._patience_s:
            raise EngineError(
                f"{error}; no server answered for {now - self._answered:.0f} s"
            ) from error
        if not server.is_reported:
            server.is_reported = True
            warnings.warn(f"{error}; it gets no requests for now", SlowerWarning, stacklevel=2)
        if server.resumes_at <= now:  # else another request has found the same failure
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

        from paceline.engines.answer_limits import UNCOMPRESSED, drop_other_headers, limiting_async

        self._lock = asyncio.Lock()
        self.num_busy, self.pause_s, self.resumes_at = 0, 0.0, 0.0
        trust_env, limit = not is_loopback(self._url), limiting_async(self._writer.timeout_s)
        self._client = openai.AsyncOpenAI(
            base_url=f"{self._url}/v1",
            api_key=self._key or "none",
            timeout=self._writer.timeout_s,
            max_retries=_RETRIES,
            default_headers=UNCOMPRESSED,
            http_client=openai.DefaultAsyncHttpxClient(
                verify=certificates(trust_env=trust_env),
                trust_env=trust_env,
                follow_redirects=False,  # the key is for this server
                event_hooks={"request": [drop_other_headers], "response": [limit]},
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
            if self._known is None:
                given = self._key, self._writer.model, self._tokenize
                self._known = await asyncio.to_thread(identify, self._url, *given)
                self._check_model(self._known[0])
            known = self._known
            if not self._is_raw:
                checked = await gives_unprocessed(partial(self._written, known), request, self._url)
                self._is_raw = checked and self._known is known  # not forgotten meanwhile
        return await self._written(known, request)

    async def _written(self, known: tuple[str, str], request: Request) -> Written:
        model, name = known
        top = self._writer.top_logprobs
        if name.startswith("llama.cpp"):
            where = f"{self._url}/completion"
            body = llama_body(request, top)
            return read_llama_completion(await self._post(where, body), where, name, top)
        where = f"{self._url}/v1/completions"
        is_vllm = name.startswith("vllm")
        body = {"model": model, **openai_body(request, top, is_vllm=is_vllm)}
        post = self._post if is_vllm else self._complete
        return read_completion(await post(where, body), where, name, top)

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
            raise refusal(where, error, self._writer) from None
        except openai.APITimeoutError:
            raise UnavailableError(
                f"{where} did not answer in {self._writer.timeout_s:.0f} s; the server may be "
                "overloaded: lower writer.concurrency or raise writer.timeout_s"
            ) from None
        except openai.APIConnectionError as error:
            raise UnavailableError(
                f"{where} cannot be reached or closed the connection "
                f"({shorten(str(error.__cause__ or error))}); check that the server runs and that "
                "this is its URL"
            ) from None
        except EngineError as error:  # a limit
            raise UnavailableError(str(error)) from None
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
