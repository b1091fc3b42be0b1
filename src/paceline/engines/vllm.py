"""vLLM behind its OpenAI-compatible server."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from paceline.engines.contract import BlockCounts, Engine, Request, Served, checked_tokens
from paceline.engines.counters import block_counts
from paceline.errors import EngineError

if TYPE_CHECKING:
    from paceline.core.sampling import SamplingParams
    from paceline.engines.client import Client

PREFIX = "vllm:"
_SETTLES = 20  # times that counters are read until two readings agree


class VllmServer(Engine):
    """A `vllm serve` that this process talks to; nobody else should, while it counts."""

    name = "vllm"

    def __init__(self, client: Client, model: str | None = None) -> None:
        self._client = client
        self.version = str(client.get("/version").get("version", ""))
        self.model = _served_model(client, model)
        self._drafts = block_counts(client.get_text("/metrics"), PREFIX) is not None

    def serve(self, request: Request) -> Served:
        before = self.counts()
        body = {
            "model": self.model,
            "prompt": list(request.prompt),
            "max_tokens": request.max_new_tokens,
            "ignore_eos": True,
            "seed": request.seed,
            "return_token_ids": True,
            **sampling_keys(request.sampling),
        }
        start = time.perf_counter()
        answer = self._client.post("/v1/completions", body)
        seconds = time.perf_counter() - start
        tokens = _choice(answer).get("token_ids")
        blocks = None if before is None else self._settled(before) - before
        return Served(checked_tokens(tokens, request, "vLLM"), seconds, blocks)

    def counts(self) -> BlockCounts | None:
        """All blocks since the server started; None: it does not draft."""
        if not self._drafts:
            return None
        return block_counts(self._client.get_text("/metrics"), PREFIX)

    def _settled(self, before: BlockCounts) -> BlockCounts:
        """The counters once they stand still: they are published after the answer is sent."""
        last = before
        for _ in range(_SETTLES):
            now = self.counts() or before
            if now == last and now != before:
                break
            last = now
            time.sleep(0.02)
        return last


def sampling_keys(sampling: SamplingParams) -> dict[str, Any]:
    """All settings, since a server's own defaults come from the model's generation_config.json."""
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": 0.0,
        "repetition_penalty": sampling.repetition_penalty,
    }


def _served_model(client: Client, wanted: str | None) -> str:
    models = [str(entry["id"]) for entry in client.get("/v1/models").get("data", ())]
    if wanted is None and models:
        return models[0]
    if wanted not in models:
        raise EngineError(
            f"{client.url} serves {', '.join(models) or 'no model'}, not {wanted}; name one of these"
        )
    return str(wanted)


def _choice(answer: dict[str, Any]) -> dict[str, Any]:
    choices = answer.get("choices")
    if not isinstance(choices, list) or not choices:
        raise EngineError("the server answered without a choice; part of the answer may be lost")
    return choices[0]
