"""SGLang: it gives block counts with each answer."""

from __future__ import annotations

import itertools
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from pydantic import BaseModel

from paceline.engines.contract import BlockCounts, Served, checked_tokens, together
from paceline.engines.servers import Server, sampling_keys

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.engines.contract import Drafting, Request


class _Meta(BaseModel):
    spec_verify_ct: int = 0
    spec_num_correct_drafts: int | None = None
    spec_num_proposed_drafts: int | None = None
    spec_correct_drafts_histogram: list[int] | None = None


class _Generated(BaseModel):
    output_ids: list[int]
    meta_info: _Meta


class SglangServer(Server):
    """An `sglang.launch_server` with a STANDALONE draft."""

    name, title = "sglang", "SGLang"
    counts_behind_end = True
    program = ("python", "-I", "-m", "sglang.launch_server")
    target_flags = ("--model-path",)
    length_flag, size_flag = "--context-length", "--max-running-requests"
    version_path = "/get_server_info"
    always_ties = ("cohere", "cohere2", "gemma", "gemma2")  # in its gemma2.py, for one

    @classmethod
    def draft(cls, drafting: Drafting) -> list[str]:
        # SGLang counts the root of a block as a drafted token.
        return [
            *("--speculative-algorithm", "STANDALONE"),
            *("--speculative-draft-model-path", drafting.draft),
            *("--speculative-num-steps", str(drafting.gamma), "--speculative-eagle-topk", "1"),
            *("--speculative-num-draft-tokens", str(drafting.gamma + 1)),
        ]

    def serve(self, request: Request) -> Served:
        settings = {
            **sampling_keys(request.sampling),
            "max_new_tokens": request.max_new_tokens,
            "ignore_eos": True,
            "sampling_seed": request.seed,
        }
        body = {"input_ids": list(request.prompt), "sampling_params": settings}
        start = time.perf_counter()
        answer = self.client.post("/generate", body, _Generated)
        seconds = time.perf_counter() - start
        tokens = checked_tokens(answer.output_ids, request, self)
        return Served(tokens, seconds, _counted(answer.meta_info))

    def serve_together(self, requests: Sequence[Request], batch_size: int) -> Served:
        with ThreadPoolExecutor(batch_size) as pool:
            return together(list(pool.map(self.serve, requests)))


def _counted(meta: _Meta) -> BlockCounts | None:
    """Block counts of an answer; None if the server does not draft or report them."""
    accepted, drafted = meta.spec_num_correct_drafts, meta.spec_num_proposed_drafts
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
