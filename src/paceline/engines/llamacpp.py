"""llama-server of llama.cpp, counted by its own /metrics."""

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
_ROUNDED = 1_000_000  # larger counters are printed with six digits


class _Properties(BaseModel):
    build_info: str = ""


class _Completion(BaseModel):
    tokens: list[int]


class LlamaServer(CountingServer):
    """A llama-server with --metrics; while it is measured, nobody else may use it.

    Its `ignore_eos` forbids end-of-text tokens to the target and not to the draft, which changes what
    is accepted, so texts end where they end.
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
            "cache_prompt": False,  # with and without the draft, the whole prompt is read
            **sampling_keys(request.sampling),
        }
        answer = self._client.post("/completion", body, _Completion)
        return checked_tokens(answer.tokens, request, self)

    def counts(self) -> BlockCounts:
        """All blocks since the server started; 0 where it does not draft."""
        try:
            counts = block_counts(self._client.get_text("/metrics"), PREFIX) or BlockCounts()
        except StatusError as error:
            if error.status not in (404, 501):
                raise
            raise EngineError(
                f"{self._client.url} does not publish its counters; start llama-server with --metrics"
            ) from error
        if counts.num_drafted >= _ROUNDED:
            raise EngineError(
                f"{self._client.url} has drafted {counts.num_drafted:,} tokens, and publishes counters of "
                "that size rounded to six digits; restart it"
            )
        return counts


def sampling_keys(sampling: SamplingParams) -> dict[str, Any]:
    """Temperature, then top-k, then top-p, as Paceline applies them; the server's own order differs."""
    return {
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": 0.0,
        "repeat_penalty": 1.0,
        "samplers": ["temperature", "top_k", "top_p"],
    }
