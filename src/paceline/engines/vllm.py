"""vLLM: its server, and the blocks of each answer."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from paceline.core.stats import DecodeStats, TimedAnswer, Times
from paceline.engines.client import parsed, said_by
from paceline.engines.servers import CountingServer, openai_body, sampling_keys, served_models
from paceline.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline.engines.client import Client
    from paceline.engines.contract import BlockCounts, Drafting, Request, Setup

RULE_VARIABLE = "PACELINE_RULE"
"""Environment variable that gives Paceline's plugin of vLLM its rule."""
RULE_IS_SET = "paceline: drafts are judged by"
"""Beginning of the line that the plugin logs when it has set the rule."""
BLOCKS = ("--per-request-spec-decode-metrics", "detailed")
"""Arguments with which `vllm serve` reports the blocks of each answer."""
_READINGS, _WAIT_S = 50, 0.02  # of vLLM's counters, at most, until two agree
_END = "[DONE]"  # of a stream


class VllmServer(CountingServer):
    """A `vllm serve`; no other client may use it during a measurement.

    Attributes:
        model: Name of the served model.
    """

    name, title = "vllm", "vLLM"
    prefix = "vllm:"
    counts_behind_end = True
    program = ("vllm", "serve")
    length_flag, size_flag = "--max-model-len", "--max-num-seqs"
    version_path = "/version"
    recorded_as = "vllm"
    samples_drafts = runs_rules = drafts_at_once = True
    always_ties = ("cohere", "cohere2", "cohere2_moe", "gemma", "gemma2", "gemma3n", "gemma3n_text")

    def __init__(self, client: Client, model: str | None = None) -> None:
        super().__init__(client, model)
        self.model = model or served_models(client)[0]

    @classmethod
    def draft(cls, drafting: Drafting) -> list[str]:
        settings = {
            "method": "draft_model",
            "model": drafting.draft,
            "num_speculative_tokens": drafting.gamma,
            "draft_sample_method": drafting.sampling,
        }
        if drafting.parallel:
            settings["parallel_drafting"] = True
        return ["--speculative-config", json.dumps(settings)]

    @classmethod
    def environment(cls, rule: str) -> dict[str, str]:
        logs = {"VLLM_LOGGING_LEVEL": "INFO"} if rule else {}  # for RULE_IS_SET
        return {**logs, "VLLM_NO_USAGE_STATS": "1", RULE_VARIABLE: rule}

    @classmethod
    def check_started(cls, setup: Setup, logged: Callable[[str], bool]) -> None:
        if setup.drafting is not None and setup.drafting.rule and not logged(RULE_IS_SET):
            raise EngineError(
                "vLLM started without Paceline's plugin, so it would ignore the rule; install "
                "Paceline in vLLM's environment: pip install -e '.[vllm]' with its pip"
            )

    @classmethod
    def tokenize_body(cls, text: str) -> dict[str, Any]:
        return {"prompt": text, "add_special_tokens": False}

    @classmethod
    def text_body(cls, model: str, request: Request, top_logprobs: int) -> dict[str, Any]:
        """Every sampling setting: vLLM's defaults come from the model's generation_config.json."""
        ids = {"return_token_ids": True, "return_tokens_as_token_ids": True}
        return openai_body(model, request, top_logprobs) | sampling_keys(request.sampling) | ids

    def body(self, request: Request) -> dict[str, Any]:
        return self.text_body(self.model, request, 0) | {"ignore_eos": True}

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

    def timed(self, request: Request) -> TimedAnswer:
        """Answer a request up to its end-of-text token, with its blocks; raises EngineError.

        The server is started with `BLOCKS`.
        """
        body = self.text_body(self.model, request, 0)
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        where = f"{self.client.url}{self.text_path}"
        tokens: list[int] = []
        blocks: list[tuple[int, int]] = []
        first_s, num_first, ended = 0.0, 0, False
        start = time.perf_counter()
        for data in self.client.stream(self.text_path, body):
            if data == _END:
                ended = True
                break
            chunk = parsed(data, _Chunk, where)
            if chunk.error is not None:
                raise EngineError(f"{where} failed: {said_by(chunk.error.message)}")
            for choice in chunk.choices:
                tokens += choice.token_ids or []
            if tokens and not num_first:
                first_s, num_first = time.perf_counter() - start, len(tokens)
            if chunk.metrics is not None and (found := chunk.metrics.speculative_decoding):
                blocks = _blocks(found, where)
        seconds = time.perf_counter() - start
        if not ended or not tokens:
            raise EngineError(f"{where} ended its answer early; read the server's log")
        times = Times(seconds, first_s, len(tokens), num_first)
        return TimedAnswer(tokens, times, examined(blocks, len(tokens)))


class _Speculation(BaseModel):
    per_step_accepted: list[int] | None = None
    per_step_drafted: list[int] | None = None


class _Metrics(BaseModel):
    speculative_decoding: _Speculation | None = None


class _Error(BaseModel):
    message: str


class _ChunkChoice(BaseModel):
    token_ids: list[int] | None = None


class _Chunk(BaseModel):
    choices: list[_ChunkChoice] = []
    metrics: _Metrics | None = None
    error: _Error | None = None


def _blocks(found: _Speculation, where: str) -> list[tuple[int, int]]:
    accepted, drafted = found.per_step_accepted or [], found.per_step_drafted or []
    if len(accepted) != len(drafted):
        raise EngineError(f"{where} counts accepted and drafted tokens of different blocks")
    return list(zip(drafted, accepted, strict=True))


def examined(blocks: Sequence[tuple[int, int]], num_tokens: int) -> DecodeStats:
    """Counts of a text from the drafted and accepted tokens of its blocks.

    What vLLM accepts behind its end is left out. The prefill gives the first token, and a block its
    accepted tokens and one more. A step without a draft gives one token.
    """
    stats, left = DecodeStats(num_prefill_tokens=1), num_tokens - 1
    for drafted, accepted in blocks:
        if left <= 0:
            break
        kept, is_rejected = min(accepted, left), accepted < min(drafted, left)
        stats += DecodeStats(
            num_blocks=1,
            num_drafted=drafted,
            num_accepted=kept,
            num_recovered=int(is_rejected),
            num_bonus=int(kept < left and not is_rejected),
        )
        left -= accepted + 1
    alone = max(left, 0)
    return stats + DecodeStats(num_blocks=alone, num_bonus=alone)
