"""What the answers of servers hold: texts, tokens and the most likely tokens of each position.

Servers differ in how they name tokens. vLLM has `token_ids`, and keys such as "token_id:123" in
`top_logprobs`. llama-server has `tokens`, and an `id` in each candidate. Others give text alone.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from pydantic import BaseModel, Field

from paceline.engines.client import parsed
from paceline.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

StopReason = Literal["eos", "length"]
TopTokens = list[tuple[int, float]]  # ids and log probabilities, most likely first
Token = Annotated[int, Field(ge=0, lt=1 << 31)]

_TOKEN = "token_id:"
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
        states: Hidden states before each token, ahead of the last norm, [N, D]; None: not asked.
    """

    text: str
    tokens: list[int] | None
    stop_reason: StopReason
    server: str
    top: list[TopTokens] | None
    states: Tensor | None = None

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


def read_completion(body: str, where: str, server: str, top_logprobs: int) -> Written:
    """Read an answer of OpenAI's completions endpoint; see `Server.read_text`."""
    choices = parsed(body, _Completion, where, AnswerError).choices
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
        top = [most_likely(row, top_logprobs, index, where) for index, row in enumerate(named)]
    reason: StopReason = "length" if choice.finish_reason == "length" else "eos"
    return Written(choice.text, tokens, reason, server, top)


def _token_id(name: str, where: str) -> int:
    number = name.removeprefix(_TOKEN)
    if number == name or not number.isdecimal():
        raise AnswerError(
            f"{where} names tokens by their text ({name[:20]!r}), which several tokens can have; "
            "use vLLM or llama-server, or set top_logprobs to 0"
        )
    return int(number)


def most_likely(candidates: TopTokens, count: int, position: int, where: str) -> TopTokens:
    """The `count` most likely candidates of a position; raises AnswerError for impossible ones."""
    if not candidates:
        raise AnswerError(
            f"{where} gives no log probabilities for token {position}; llama-server has none for "
            "tokens that it drafted, so serve the target without a draft"
        )
    bad = [value for _, value in candidates if math.isnan(value) or value > _ROUNDING]
    if bad or sum(math.exp(value) for _, value in candidates) > 1 + _ROUNDING:
        shown = f"the log probability {bad[0]}" if bad else "probabilities whose sum exceeds 1"
        raise AnswerError(
            f"{where} gives {shown} for token {position}; the model or the server is damaged, or "
            "vLLM gives logits (--logprobs-mode)"
        )
    return sorted(candidates, key=lambda candidate: -candidate[1])[:count]
