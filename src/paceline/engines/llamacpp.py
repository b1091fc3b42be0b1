"""llama.cpp's llama-server, with block counts from /metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from paceline.engines.client import StatusError
from paceline.engines.contract import BlockCounts, Conventions, Request, checked_tokens
from paceline.engines.counters import block_counts
from paceline.engines.counting import CountingServer
from paceline.errors import EngineError

if TYPE_CHECKING:
    from paceline.core.sampling import SamplingParams
    from paceline.engines.client import Client

PREFIX = "llamacpp:"
_ROUNDED = 1_000_000  # /metrics rounds counters from here on to six digits


class _Properties(BaseModel):
    build_info: str = ""


class _Completion(BaseModel):
    tokens: list[int]


class LlamaServer(CountingServer):
    """A llama-server with --metrics; no other client may use it during a measurement.

    Texts stop at end-of-text tokens: `ignore_eos` would forbid these tokens to the target but not
    to the draft, which changes acceptance.
    """

    name = "llamacpp"
    conventions = Conventions(ignores_end=False, counts_empty_blocks=False)

    def __init__(self, client: Client) -> None:
        self._client = client
        self.version = client.get("/props", _Properties).build_info
        self.counts()

    def ask(self, request: Request) -> list[int]:
        body = {
            "prompt": list(request.prompt),
            "n_predict": request.max_new_tokens,
            "seed": request.seed,
            "return_tokens": True,
            "cache_prompt": False,  # time the whole prompt, with and without the draft
            **sampling_keys(request.sampling),
        }
        answer = self._client.post("/completion", body, _Completion)
        return checked_tokens(answer.tokens, request, self)

    def counts(self) -> BlockCounts:
        """Block counts since the server started; 0 if it does not draft."""
        try:
            counts = block_counts(self._client.get_text("/metrics"), PREFIX) or BlockCounts()
        except StatusError as error:
            if error.status not in (404, 501):
                raise
            raise EngineError(
                f"{self._client.url} does not publish counters; start llama-server with --metrics"
            ) from error
        if counts.num_drafted >= _ROUNDED:
            raise EngineError(
                f"{self._client.url} has drafted {counts.num_drafted:,} tokens, and its /metrics "
                "rounds counters of this size to six digits; restart the server"
            )
        return counts


def sampling_keys(sampling: SamplingParams) -> dict[str, Any]:
    """Sampling settings of a request, in Paceline's order: temperature, top-k, top-p."""
    return {
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": 0.0,
        "repeat_penalty": 1.0,
        "samplers": ["temperature", "top_k", "top_p"],
    }
