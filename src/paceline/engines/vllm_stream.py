"""A streamed answer of vLLM: its tokens, the time of the first one, and the blocks of its draft."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from pydantic import BaseModel

from paceline.engines.client import parsed, shorten
from paceline.engines.vllm import sampling_keys
from paceline.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.engines.client import Client
    from paceline.engines.contract import Request

BLOCKS = ("--per-request-spec-decode-metrics", "detailed")
"""Arguments with which `vllm serve` reports the blocks of each answer."""

_PATH = "/v1/completions"
_END = "[DONE]"


class VerifiedBlock(NamedTuple):
    """Drafted tokens of a block, and how many of them were accepted."""

    num_drafted: int
    num_accepted: int


class StreamedAnswer(NamedTuple):
    """One answer.

    Attributes:
        tokens: Generated tokens, including any end-of-text token.
        seconds: From sending the request to the end of the answer.
        first_seconds: To the first tokens, which are `num_first_tokens`.
        blocks: The verified blocks in order; none without a draft.
    """

    tokens: list[int]
    seconds: float
    first_seconds: float
    num_first_tokens: int
    blocks: list[VerifiedBlock]


class ExaminedBlocks(NamedTuple):
    """Counts of the blocks within a text.

    Attributes:
        num_passes: Target passes after the prefill.
        num_examined: Drafted tokens that were accepted or rejected.
        num_rejected: Rejected drafted tokens.
    """

    num_passes: int
    num_drafted: int
    num_examined: int
    num_rejected: int


class _Choice(BaseModel):
    token_ids: list[int] | None = None


class _Speculation(BaseModel):
    per_step_accepted: list[int] | None = None
    per_step_drafted: list[int] | None = None


class _Metrics(BaseModel):
    speculative_decoding: _Speculation | None = None


class _Error(BaseModel):
    message: str


class _Chunk(BaseModel):
    choices: list[_Choice] = []
    metrics: _Metrics | None = None
    error: _Error | None = None


def stream_answer(client: Client, model: str, request: Request) -> StreamedAnswer:
    """Answer a request up to its end-of-text token; raises EngineError.

    The server is started with `BLOCKS`.
    """
    body = {
        "model": model,
        "prompt": list(request.prompt),
        "max_tokens": request.max_new_tokens,
        "seed": request.seed,
        "return_token_ids": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **sampling_keys(request.sampling),
    }
    where = f"{client.url}{_PATH}"
    tokens: list[int] = []
    blocks: list[VerifiedBlock] = []
    first_s, num_first, ended = 0.0, 0, False
    start = time.perf_counter()
    for data in client.stream(_PATH, body):
        if data == _END:
            ended = True
            break
        chunk = parsed(data, _Chunk, where)
        if chunk.error is not None:
            raise EngineError(f"{where} failed: {shorten(chunk.error.message)}")
        for choice in chunk.choices:
            tokens += choice.token_ids or []
        if tokens and not num_first:
            first_s, num_first = time.perf_counter() - start, len(tokens)
        if chunk.metrics is not None and (found := chunk.metrics.speculative_decoding):
            blocks = _blocks(found, where)
    seconds = time.perf_counter() - start
    if not ended or not tokens:
        raise EngineError(f"{where} ended its answer early; read the server's log")
    return StreamedAnswer(tokens, seconds, first_s, num_first, blocks)


def _blocks(found: _Speculation, where: str) -> list[VerifiedBlock]:
    accepted, drafted = found.per_step_accepted or [], found.per_step_drafted or []
    if len(accepted) != len(drafted):
        raise EngineError(f"{where} counts accepted and drafted tokens of different blocks")
    return [VerifiedBlock(*pair) for pair in zip(drafted, accepted, strict=True)]


def examined(blocks: Sequence[VerifiedBlock], num_tokens: int) -> ExaminedBlocks:
    """Counts of the blocks of a text; what vLLM accepts behind its end is left out.

    The prefill gives the first token, and a block its accepted tokens and one more. A step without
    a draft gives one token.
    """
    left = num_tokens - 1
    found = [0, 0, 0, 0]
    for drafted, accepted in blocks:
        if left <= 0:
            break
        is_rejected = accepted < min(drafted, left)
        seen = min(accepted, left) + is_rejected
        found = [a + b for a, b in zip(found, (1, drafted, seen, int(is_rejected)), strict=True)]
        left -= accepted + 1
    found[0] += max(left, 0)
    return ExaminedBlocks(*found)
