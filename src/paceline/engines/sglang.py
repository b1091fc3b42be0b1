"""SGLang's server, with block counts from each answer of /generate."""

from __future__ import annotations

import itertools
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from pydantic import BaseModel

from paceline.engines.contract import (
    BlockCounts,
    Conventions,
    Engine,
    Request,
    Served,
    Together,
    checked_tokens,
    together,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.engines.client import Client


class _Info(BaseModel):
    version: str = ""


class _Meta(BaseModel):
    """Block counts; `spec_accept_token_num` and `spec_draft_token_num` are of older versions."""

    spec_verify_ct: int = 0
    spec_num_correct_drafts: int | None = None
    spec_num_proposed_drafts: int | None = None
    spec_accept_token_num: int | None = None
    spec_draft_token_num: int | None = None
    spec_correct_drafts_histogram: list[int] | None = None


class _Generated(BaseModel):
    output_ids: list[int]
    meta_info: _Meta


class SglangServer(Engine):
    """An `sglang.launch_server` with a STANDALONE draft."""

    name = "sglang"
    conventions = Conventions(counts_behind_end=True)

    def __init__(self, client: Client) -> None:
        self._client = client
        self.version = client.get("/get_server_info", _Info).version

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
                "repetition_penalty": 1.0,
                "sampling_seed": request.seed,
            },
        }
        start = time.perf_counter()
        answer = self._client.post("/generate", body, _Generated)
        seconds = time.perf_counter() - start
        tokens = checked_tokens(answer.output_ids, request, self)
        return Served(tokens, seconds, _blocks(answer.meta_info))

    def serve_together(self, requests: Sequence[Request], batch_size: int) -> Together:
        with ThreadPoolExecutor(batch_size) as pool:
            return together(list(pool.map(self.serve, requests)))


def _blocks(meta: _Meta) -> BlockCounts | None:
    """Block counts of an answer; None if the server does not draft or report them."""
    accepted, drafted = meta.spec_num_correct_drafts, meta.spec_num_proposed_drafts
    if accepted is None or drafted is None:
        accepted, drafted = meta.spec_accept_token_num, meta.spec_draft_token_num
    if not meta.spec_verify_ct or accepted is None or drafted is None:
        return None
    by_position = None
    if (histogram := meta.spec_correct_drafts_histogram) is not None:
        # blocks with 0, 1, 2, ... accepted -> blocks that accepted the first, second, ... token
        by_position = tuple(itertools.accumulate(histogram[:0:-1]))[::-1]
    return BlockCounts(
        num_blocks=meta.spec_verify_ct,
        num_drafted=drafted,
        num_accepted=accepted,
        accepted_by_position=by_position,
    )
