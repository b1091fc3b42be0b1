"""Texts from servers: their configuration, the requests, and what the answers hold.

Servers differ in how they name tokens. vLLM has `token_ids`, and keys such as "token_id:123" in
`top_logprobs`. llama-server has `tokens`, and an `id` in each candidate; its OpenAI endpoint omits
tokens that end within a character, so its own endpoint is used. Others give text alone.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, Field, field_validator, model_validator

from paceline.config import StrictModel
from paceline.engines.client import (
    KeyVariable,
    UnavailableError,
    advice_for,
    parsed,
    refusal,
    root_of,
    without_keys,
)
from paceline.engines.commands import EngineChoice
from paceline.engines.kinds import names_of, text_form
from paceline.engines.servers import openai_body, openai_scores
from paceline.errors import EngineError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    import httpx2

    from paceline.engines.client import Shape
    from paceline.engines.contract import Request


MAY_CHANGE = frozenset(
    f"writer.{name}" for name in ("url", "api_key_env", "concurrency", "timeout_s", "patience_s")
)
"""Settings of servers, in the configuration of a run, that may differ when it is resumed."""

Url = Annotated[str, Field(min_length=1)]


class OpenAIWriter(StrictModel):
    """Servers with an OpenAI-compatible completions endpoint that serve the same model.

    Attributes:
        url: URL of a server, or of several, which share the requests. A server that does not answer
            gets no requests until it answers again.
        model: Name of the model; None: the only one that the server serves.
        api_key_env: Environment variable that holds the API key.
        concurrency: Requests in flight per server.
        top_logprobs: Also record the K most likely tokens of each position with their log
            probabilities, to distil from (0: none). vLLM allows 20 unless it is started with
            --max-logprobs. They must be those before temperature and filters, which is checked.
        timeout_s: Timeout of a request.
        patience_s: How long to wait while no server answers.
    """

    kind: Literal["openai"] = "openai"
    url: Url | tuple[Url, ...]
    model: str | None = None
    api_key_env: KeyVariable = None
    concurrency: int = Field(default=16, ge=1)
    top_logprobs: int = Field(default=0, ge=0)
    timeout_s: float = Field(default=600.0, gt=0)
    patience_s: float = Field(default=300.0, ge=0)

    @field_validator("url")
    @classmethod
    def _are_roots(cls, url: str | tuple[str, ...]) -> str | tuple[str, ...]:
        found = [root_of(each) for each in ([url] if isinstance(url, str) else url)]
        if not found:
            raise ValueError("url is empty; give the URL of at least one server")
        if len(set(found)) < len(found):
            raise ValueError(f"url names a server twice: {', '.join(found)}")
        return url

    @property
    def urls(self) -> list[str]:
        """Roots of the servers, without /v1."""
        return [root_of(url) for url in ([self.url] if isinstance(self.url, str) else self.url)]


class EngineWriter(StrictModel):
    """A server that each worker starts for itself and stops at its end.

    Attributes:
        engine: How to start it, as in `measure --engine`; without a draft.
        concurrency: Requests in flight per server.
        top_logprobs: As in `OpenAIWriter`.
        gpus: GPUs per server; only used by pool ray, which gives each actor its own.
        timeout_s: Timeout of a request.
    """

    kind: Literal["engine"] = "engine"
    engine: EngineChoice
    concurrency: int = Field(default=16, ge=1)
    top_logprobs: int = Field(default=0, ge=0)
    gpus: float = Field(default=1.0, ge=0)
    timeout_s: float = Field(default=600.0, gt=0)

    @model_validator(mode="after")
    def _starts_a_server(self) -> EngineWriter:
        choice = self.engine
        if choice.kind.in_process or choice.url is not None:
            servers = names_of(lambda kind: not kind.in_process)
            raise ValueError(
                f"writer.engine starts a server: give {servers} without url; for a running "
                "server, set writer.kind to openai"
            )
        if choice.draft is not None:
            raise ValueError("writer.engine.draft is not used; leave it out")
        return self

    def at(self, url: str) -> OpenAIWriter:
        """The writer for its server, once that runs."""
        return OpenAIWriter(
            url=url,
            concurrency=self.concurrency,
            top_logprobs=self.top_logprobs,
            timeout_s=self.timeout_s,
            patience_s=0.0,  # a server that has ended does not come back
        )


KEY_SETTING = "writer.api_key_env"


class RefusedError(UsageError):
    """The server refuses the content of a request."""


def refused(where: str, answer: httpx2.Response, writer: OpenAIWriter) -> EngineError | UsageError:
    """The error for an answer with another status than 200."""
    status = answer.status_code
    advice = advice_for(status, KEY_SETTING)
    if status == 401 and writer.api_key_env is not None:
        advice = f"the API key in {writer.api_key_env} is not the server's"
    if status == 400 and writer.top_logprobs:
        advice = "lower writer.top_logprobs, or start vLLM with a higher --max-logprobs"
    return by_status(refusal(where, answer, advice), status)


def may_pass(status: int) -> bool:
    """True if the server may answer the same request later."""
    return status in (408, 409, 425, 429) or (status >= 500 and status != 501)


def by_status(message: str, status: int) -> EngineError | UsageError:
    """Statuses that may pass make a server unavailable, and the others are errors of the user."""
    if may_pass(status):
        return UnavailableError(message)
    return RefusedError(message) if status in (400, 422) else UsageError(message)


def processed(where: str, sign: str) -> UsageError:
    """The error for log probabilities after temperature or filters."""
    return UsageError(
        f"{where} gives log probabilities after temperature, top-k and top-p, which are not the "
        f"target's ({sign}); start vLLM with --logprobs-mode raw_logprobs, and llama-server behind "
        "nothing that sets post_sampling_probs"
    )


_NEUTRAL: dict[str, Any] = {"min_p": 0.0, "repetition_penalty": 1.0}
NEUTRAL_FORMS: tuple[dict[str, Any], ...] = (
    {"top_k": -1, **_NEUTRAL},  # SGLang
    {"top_k": 0, **_NEUTRAL, "repeat_penalty": 1.0},  # llama-cpp-python and others
    {},
)
"""Settings beyond OpenAI's that a server may take from its model if a request lacks them."""

_SEEDS = 2**31  # servers keep 32 bits of a seed


def text_body(
    request: Request, top_logprobs: int, *, model: str, server: str
) -> tuple[str, dict[str, Any]]:
    """The path and the body of a request to a server of this name and version."""
    request = request._replace(seed=request.seed % _SEEDS)
    if (form := text_form(server)) is not None:
        return form.path, form.body(model, request, top_logprobs)
    top_k = request.sampling.top_k
    body = {"model": model, **openai_body(request), **({"top_k": top_k} if top_k else {})}
    return "/v1/completions", body | openai_scores(top_logprobs)


StopReason = Literal["eos", "length"]
TopTokens = list[tuple[int, float]]  # ids and log probabilities, most likely first
Token = Annotated[int, Field(ge=0, lt=1 << 31)]

_TOKEN = "token_id:"
_DIGITS = 9  # of a token's number
_CHARACTER = 4  # the most tokens of one character
_ROUNDING = 1e-3  # by which probabilities may exceed 1, and their logarithms 0


class AnswerError(EngineError):
    """An answer is damaged or incomplete; asking again may help."""


class Written(NamedTuple):
    """An answer.

    Attributes:
        text: As the server gives it.
        tokens: Generated tokens, including any end-of-text token; None if the server gives text
            alone.
        stop_reason: `eos`, or `length` if the text was truncated.
        server: Name and version of the server, such as `vllm 0.32.0`; empty if it gives none.
        top: The most likely tokens of each position, none for tokens of llama-server that end
            within a character; None if they were not requested.
    """

    text: str
    tokens: list[int] | None
    stop_reason: StopReason
    server: str
    top: list[TopTokens] | None

    def tokens_by(self, tokenize: Callable[[str], list[int]], end: int | None) -> list[int]:
        """The tokens; if the server gave text alone, of its text and the token `end`."""
        if self.tokens is not None:
            return self.tokens
        tokens = tokenize(self.text)
        return [*tokens, end] if self.stop_reason == "eos" and end is not None else tokens

    @property
    def top_tokens(self) -> list[list[int]] | None:
        """Ids of the most likely tokens of each position."""
        return None if self.top is None else [[token for token, _ in row] for row in self.top]

    @property
    def top_log_probs(self) -> list[list[float]] | None:
        """Log probabilities of the most likely tokens of each position."""
        return None if self.top is None else [[value for _, value in row] for row in self.top]


class _Logprobs(BaseModel):
    top_logprobs: list[dict[str, float] | None] = []


class _Choice(BaseModel):
    text: str
    finish_reason: Literal["stop", "length"]
    token_ids: list[Token] | None = None
    logprobs: _Logprobs | None = None


class _Completion(BaseModel):
    choices: list[_Choice]


class _Candidate(BaseModel):
    id: Token
    logprob: float


class _Entry(BaseModel):
    id: Token
    top_logprobs: list[_Candidate] = []
    top_probs: list[Any] | None = None  # with post_sampling_probs


class _LlamaCompletion(BaseModel):
    content: str
    tokens: list[Token]
    stop_type: Literal["eos", "word", "limit"]
    completion_probabilities: list[_Entry] = []


def read_answer(path: str, body: str, where: str, server: str, top_logprobs: int) -> Written:
    """Read an answer to the request of `text_body` with this path.

    Raises:
        AnswerError: It is truncated, or misses log probabilities that were requested.
        UsageError: It has probabilities after sampling settings.
    """
    read = _read_llama_completion if path == "/completion" else _read_completion
    return read(body, where, server, top_logprobs)


def _read_completion(body: str, where: str, server: str, top_logprobs: int) -> Written:
    choices = _parsed(body, _Completion, where).choices
    if len(choices) != 1:
        raise AnswerError(f"{where} answered with {len(choices)} choices; wanted one")
    choice = choices[0]
    tokens, top = choice.token_ids, None
    if top_logprobs:
        rows = [] if choice.logprobs is None else choice.logprobs.top_logprobs
        if tokens is None or len(rows) != len(tokens):
            count = "text without token ids" if tokens is None else f"{len(tokens)} tokens"
            raise AnswerError(
                f"{where} answered with {count} and the log probabilities of {len(rows)}; use vLLM "
                "or llama-server, or set top_logprobs to 0"
            )
        named = [
            [(_token_id(name, where), value) for name, value in (row or {}).items()] for row in rows
        ]
        top = [_checked(row, top_logprobs, index, where) for index, row in enumerate(named)]
    reason: StopReason = "length" if choice.finish_reason == "length" else "eos"
    return Written(choice.text, tokens, reason, server, top)


def _read_llama_completion(body: str, where: str, server: str, top_logprobs: int) -> Written:
    found = _parsed(body, _LlamaCompletion, where)
    top = None
    if top_logprobs:
        top = []
        entries = iter(found.completion_probabilities)
        entry = next(entries, None)
        for index, token in enumerate(found.tokens):
            if entry is None or entry.id != token:
                top.append([])
                continue
            if entry.top_probs is not None:
                raise processed(where, "post_sampling_probs is set")
            row = [(candidate.id, candidate.logprob) for candidate in entry.top_logprobs]
            top.append(_checked(row, top_logprobs, index, where))
            entry = next(entries, None)
        if entry is not None or (len(found.tokens) >= _CHARACTER and not any(top)):
            raise AnswerError(
                f"{where} answered with {len(found.tokens)} tokens and other log probabilities, of "
                f"{len(found.completion_probabilities)}"
            )
    reason: StopReason = "length" if found.stop_type == "limit" else "eos"
    return Written(found.content, found.tokens, reason, server, top)


def _parsed(body: str, shape: type[Shape], where: str) -> Shape:
    try:
        return parsed(body, shape, where)
    except EngineError as error:
        raise AnswerError(str(error)) from None


def _token_id(name: str, where: str) -> int:
    number = name.removeprefix(_TOKEN)
    if number == name or not number.isdecimal() or len(number) > _DIGITS:
        raise AnswerError(
            f"{where} names tokens by their text ({without_keys(name)[:20]!r}), which several "
            "tokens can have; use vLLM or llama-server, or set top_logprobs to 0"
        )
    return int(number)


def _checked(candidates: TopTokens, count: int, position: int, where: str) -> TopTokens:
    """The `count` most likely candidates of a position."""
    if not candidates:
        raise AnswerError(
            f"{where} gives no log probabilities for token {position}; llama-server has none for "
            "tokens that it drafted, so serve the target without a draft"
        )
    bad = [value for _, value in candidates if math.isnan(value) or value > _ROUNDING]
    if bad:
        raise AnswerError(
            f"{where} gives the log probability {bad[0]} for token {position}; the model or the "
            "server is damaged, or vLLM gives logits (--logprobs-mode)"
        )
    if len({token for token, _ in candidates}) < len(candidates):
        raise AnswerError(f"{where} names a candidate of token {position} twice")
    if sum(math.exp(value) for _, value in candidates) > 1 + _ROUNDING:
        raise AnswerError(
            f"{where} gives probabilities for token {position} whose sum exceeds 1; the model or "
            "the server is damaged"
        )
    return sorted(candidates, key=lambda candidate: -candidate[1])[:count]
