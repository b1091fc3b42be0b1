"""Reads answers of servers: token ids, and the most likely tokens of each position.

Servers differ in how they name tokens. vLLM has `token_ids`, and keys such as "token_id:123" in
`top_logprobs`. llama-server has `tokens`, and an `id` in each candidate; its OpenAI endpoint omits
tokens that end within a character, so its own endpoint is used. Others give text alone.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, Field, ValidationError

from paceline.engines.client import shorten, without_keys
from paceline.engines.text_errors import processed
from paceline.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Callable

StopReason = Literal["eos", "length"]
TopTokens = list[tuple[int, float]]  # ids and log probabilities, most likely first
Token = Annotated[int, Field(ge=0, lt=1 << 31)]
Shape = TypeVar("Shape", bound=BaseModel)

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


def tokens_of(written: Written, tokenize: Callable[[str], list[int]], end: int | None) -> list[int]:
    """Tokens of an answer; if the server gave text alone, of its text and the end-of-text token."""
    if written.tokens is not None:
        return written.tokens
    tokens = tokenize(written.text)
    if written.stop_reason == "eos" and end is not None:
        tokens.append(end)
    return tokens


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


def read_completion(body: str, where: str, server: str, top_logprobs: int) -> Written:
    """Read an answer of /v1/completions.

    Raises:
        AnswerError: It is truncated, or misses log probabilities that were requested.
    """
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


def read_llama_completion(body: str, where: str, server: str, top_logprobs: int) -> Written:
    """Read an answer of llama-server's /completion; raises as `read_completion`.

    Raises:
        UsageError: It has probabilities after sampling settings.
    """
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
        return shape.model_validate(json.loads(body))
    except ValidationError as error:
        fault = error.errors()[0]
        field = ".".join(map(str, fault["loc"])) or "JSON"
        raise AnswerError(f"{where} answered with invalid {field} ({fault['msg']})") from None
    except (ValueError, RecursionError):
        shown = shorten(body)[:60]
        raise AnswerError(
            f"{where} answered with text that is not JSON ({shown!r}); the answer may be truncated"
        ) from None


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
