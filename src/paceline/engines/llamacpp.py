"""llama.cpp's llama-server."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from paceline.engines.contract import BlockCounts, Engine, Request, Served, checked_tokens
from paceline.engines.counters import block_counts
from paceline.errors import EngineError

if TYPE_CHECKING:
    from paceline.core.sampling import SamplingParams
    from paceline.engines.client import Client

PREFIX = "llamacpp:"


class LlamaServer(Engine):
    """A llama-server; started with --metrics it also says which positions were kept."""

    name = "llamacpp"

    def __init__(self, client: Client) -> None:
        self._client = client
        self.version = str(client.get("/props").get("build_info", ""))

    def serve(self, request: Request) -> Served:
        before = self._counters()
        body = {
            "prompt": list(request.prompt),
            "n_predict": request.max_new_tokens,
            "ignore_eos": True,
            "seed": request.seed,
            "return_tokens": True,
            "cache_prompt": False,  # the other half of the pair reads the whole prompt, too
            **sampling_keys(request.sampling),
        }
        start = time.perf_counter()
        answer = self._client.post("/completion", body)
        seconds = time.perf_counter() - start
        tokens = checked_tokens(answer.get("tokens"), request, "llama-server")
        now = self._counters()
        if now is not None and before is not None:
            return Served(tokens, seconds, now - before)
        return Served(tokens, seconds, _from_timings(answer, len(tokens)))

    def _counters(self) -> BlockCounts | None:
        """None: the server was started without --metrics, or does not draft."""
        try:
            return block_counts(self._client.get_text("/metrics"), PREFIX)
        except EngineError:
            return None


def _from_timings(answer: dict[str, Any], num_tokens: int) -> BlockCounts | None:
    """Drafted and accepted tokens of one answer; None where nothing was drafted.

    Each pass behind the prompt's gives one token beside the accepted ones.
    """
    timings = answer.get("timings", {})
    if "draft_n" not in timings:
        return None
    accepted = int(timings["draft_n_accepted"])
    return BlockCounts(
        num_blocks=num_tokens - 1 - accepted,
        num_drafted=int(timings["draft_n"]),
        num_accepted=accepted,
    )


def sampling_keys(sampling: SamplingParams) -> dict[str, Any]:
    """Temperature, then top-k, then top-p, as everywhere in Paceline; the server's own order differs."""
    return {
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": 0.0,
        "repeat_penalty": sampling.repetition_penalty,
        "samplers": ["penalties", "temperature", "top_k", "top_p"],
    }
