"""vLLM's OpenAI-compatible server, with block counts from /metrics."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from paceline.engines.client import shorten
from paceline.engines.contract import BlockCounts, Conventions, Request, checked_tokens
from paceline.engines.counters import block_counts
from paceline.engines.counting import CountingServer
from paceline.errors import EngineError

if TYPE_CHECKING:
    from paceline.core.sampling import SamplingParams
    from paceline.engines.client import Client

PREFIX = "vllm:"
_READINGS = 50  # of the counters, at most, until two agree
_WAIT_S = 0.02


class _Version(BaseModel):
    version: str = ""


class _Named(BaseModel):
    id: str


class Models(BaseModel):
    """The answer of /v1/models."""

    data: list[_Named]


class _Choice(BaseModel):
    token_ids: list[int]


class _Completion(BaseModel):
    choices: list[_Choice]


class VllmServer(CountingServer):
    """A `vllm serve`; no other client may use it during a measurement.

    Attributes:
        client: Its HTTP client.
        model: Name of the served model.
    """

    name = "vllm"
    conventions = Conventions(counts_behind_end=True)

    def __init__(self, client: Client, model: str | None = None) -> None:
        self.client = client
        self.version = client.get("/version", _Version).version
        self.model = _served_model(client, model)

    def ask(self, request: Request) -> list[int]:
        body = {
            "model": self.model,
            "prompt": list(request.prompt),
            "max_tokens": request.max_new_tokens,
            "ignore_eos": True,
            "seed": request.seed,
            "return_token_ids": True,
            **sampling_keys(request.sampling),
        }
        answer = self.client.post("/v1/completions", body, _Completion)
        if not answer.choices:
            raise EngineError("vllm answered without a choice; the answer may be truncated")
        return checked_tokens(answer.choices[0].token_ids, request, self)

    def counts(self) -> BlockCounts | None:
        return block_counts(self.client.get_text("/metrics"), PREFIX)

    def settled(self, before: BlockCounts) -> BlockCounts:
        """Wait until the counters stop changing: vLLM updates them after it has answered."""
        last = before
        for _ in range(_READINGS):
            now = self.counts() or before
            if now == last and now != before:
                break
            last = now
            time.sleep(_WAIT_S)
        return last


def sampling_keys(sampling: SamplingParams) -> dict[str, Any]:
    """Every sampling setting: the server's defaults come from generation_config.json."""
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
    }


def _served_model(client: Client, wanted: str | None) -> str:
    models = [model.id for model in client.get("/v1/models", Models).data]
    if not models:
        raise EngineError(f"{client.url} serves no model")
    if wanted is not None and wanted not in models:
        raise EngineError(
            f"{client.url} serves {shorten(', '.join(models))}, not {wanted}; name one of these"
        )
    return wanted or models[0]
