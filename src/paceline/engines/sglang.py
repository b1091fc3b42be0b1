"""SGLang behind its own server, whose /generate answers with counts of each request."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from paceline.engines.contract import BlockCounts, Engine, Request, Served, checked_tokens

if TYPE_CHECKING:
    from paceline.engines.client import Client


class SglangServer(Engine):
    """An `sglang.launch_server`, drafting by STANDALONE."""

    name = "sglang"

    def __init__(self, client: Client) -> None:
        self._client = client
        self.version = str(client.get("/get_server_info").get("version", ""))

    def serve(self, request: Request) -> Served:
        sampling = request.sampling
        body = {
            "input_ids": list(request.prompt),
            "sampling_params": {
                "max_new_tokens": request.max_new_tokens,
                "ignore_eos": True,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k or -1,
                "min_p": 0.0,
                "repetition_penalty": sampling.repetition_penalty,
                "sampling_seed": request.seed,
            },
        }
        start = time.perf_counter()
        answer = self._client.post("/generate", body)
        seconds = time.perf_counter() - start
        tokens = checked_tokens(answer.get("output_ids"), request, "SGLang")
        return Served(tokens, seconds, _blocks(answer.get("meta_info", {})))


def _blocks(meta: dict[str, Any]) -> BlockCounts | None:
    """Counts of one request, under the names of newer or older versions."""
    if not meta.get("spec_verify_ct"):
        return None
    accepted = meta.get("spec_num_correct_drafts", meta.get("spec_accept_token_num"))
    drafted = meta.get("spec_num_proposed_drafts", meta.get("spec_draft_token_num"))
    if accepted is None or drafted is None:
        return None
    histogram = meta.get("spec_correct_drafts_histogram")
    return BlockCounts(
        num_blocks=int(meta["spec_verify_ct"]),
        num_drafted=int(drafted),
        num_accepted=int(accepted),
        accepted_by_position=_at_least(histogram) if histogram else None,
    )


def _at_least(histogram: list[int]) -> tuple[int, ...]:
    """Blocks with 0, 1, 2, ... kept tokens -> blocks whose first, second, ... token was kept."""
    return tuple(sum(histogram[place:]) for place in range(1, len(histogram)))
