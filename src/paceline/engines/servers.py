"""Servers that are measured: vLLM, SGLang and llama-server, with their block counts.

vLLM and llama-server publish cumulative counters at /metrics in the Prometheus text format, so a
measurement is the difference of two readings. SGLang gives block counts with each answer.
"""

from __future__ import annotations

import itertools
import math
import time
from abc import abstractmethod
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from paceline.core.stats import DecodeStats, TimedAnswer, Times
from paceline.engines.client import StatusError, parsed, shorten
from paceline.engines.contract import (
    BlockCounts,
    Conventions,
    Engine,
    Request,
    Served,
    checked_tokens,
    together,
)
from paceline.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from prometheus_client.metrics_core import Metric

    from paceline.core.sampling import SamplingParams
    from paceline.engines.client import Client


_LONGEST = 4 << 20  # characters of /metrics
_READINGS, _WAIT_S = 50, 0.02  # of vLLM's counters, at most, until two agree
_ROUNDED = 1_000_000  # llama-server rounds counters from here on to six digits
_COMPLETIONS = "/v1/completions"
_END = "[DONE]"  # of a stream
BLOCKS = ("--per-request-spec-decode-metrics", "detailed")
"""Arguments with which `vllm serve` reports the blocks of each answer."""


class Version(BaseModel):
    """The answer of vLLM's /version and of SGLang's /get_server_info."""

    version: str = ""


class Properties(BaseModel):
    """The answer of llama-server's /props."""

    build_info: str = ""


class _Named(BaseModel):
    id: str


class _Models(BaseModel):
    data: list[_Named]


class _Choice(BaseModel):
    token_ids: list[int]


class _Completion(BaseModel):
    choices: list[_Choice]


class _LlamaCompletion(BaseModel):
    tokens: list[int]


def served_models(client: Client) -> list[str]:
    """Names of the models that an OpenAI-compatible server serves."""
    return [model.id for model in client.get("/v1/models", _Models).data]


def openai_body(request: Request) -> dict[str, Any]:
    """The settings of /v1/completions that every server knows."""
    return {
        "prompt": list(request.prompt),
        "max_tokens": request.max_new_tokens,
        "temperature": request.sampling.temperature,
        "top_p": request.sampling.top_p,
        "seed": request.seed,
    }


def vllm_body(model: str, request: Request) -> dict[str, Any]:
    """Every sampling setting: vLLM's defaults come from the model's generation_config.json."""
    settings = sampling_keys(request.sampling)
    return {"model": model, **openai_body(request), **settings, "return_token_ids": True}


def sampling_keys(sampling: SamplingParams) -> dict[str, Any]:
    """Every sampling setting, by the names of vLLM and SGLang."""
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
    }


def llama_body(request: Request) -> dict[str, Any]:
    """Settings of llama-server's /completion, in Paceline's order: temperature, top-k, top-p."""
    return {
        "prompt": list(request.prompt),
        "n_predict": request.max_new_tokens,
        "seed": request.seed,
        "return_tokens": True,
        "temperature": request.sampling.temperature,
        "top_k": request.sampling.top_k,
        "top_p": request.sampling.top_p,
        "min_p": 0.0,
        "repeat_penalty": 1.0,
        "samplers": ["temperature", "top_k", "top_p"],
    }


def openai_scores(top_logprobs: int) -> dict[str, Any]:
    """Settings of /v1/completions for a text: no penalties, and log probabilities."""
    scores = {"logprobs": top_logprobs} if top_logprobs else {}
    return {"presence_penalty": 0.0, "frequency_penalty": 0.0, **scores}


def vllm_text_body(model: str, request: Request, top_logprobs: int) -> dict[str, Any]:
    """For a text of vLLM, whose candidates are named by their ids."""
    named = {"return_tokens_as_token_ids": True}
    return vllm_body(model, request) | named | openai_scores(top_logprobs)


def llama_text_body(_model: str, request: Request, top_logprobs: int) -> dict[str, Any]:
    """For a text of llama-server."""
    return llama_body(request) | {"n_probs": top_logprobs, "post_sampling_probs": False}


class CountingServer(Engine):
    """A server with cumulative counters; no other client may use it during a measurement.

    Attributes:
        prefix: Of the names of its counters.
        client: Its HTTP client.
    """

    prefix: str

    def __init__(self, client: Client) -> None:
        self.client = client

    def serve(self, request: Request) -> Served:
        return self.serve_together([request], 1)

    def serve_together(self, requests: Sequence[Request], batch_size: int) -> Served:
        before = self.counts()
        with ThreadPoolExecutor(batch_size) as pool:
            answers = together(list(pool.map(self._timed, requests)))
        after = None if before is None else self.settled(before) - before
        return answers._replace(blocks=after)

    def _timed(self, request: Request) -> Served:
        start = time.perf_counter()
        tokens = self.ask(request)
        return Served(tokens, time.perf_counter() - start, None)

    @abstractmethod
    def ask(self, request: Request) -> list[int]:
        """Send a request and read its tokens."""

    def counts(self) -> BlockCounts | None:
        """Block counts since the server started; None if it has no such counters."""
        return block_counts(self.client.get_text("/metrics"), self.prefix)

    def settled(self, before: BlockCounts) -> BlockCounts:
        """Return the counters once they include all answers."""
        return self.counts() or before


def read_counters(text: str, prefix: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Return labels and value of each sample, by name without `prefix` and `_total`."""
    from prometheus_client.parser import text_string_to_metric_families

    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    if len(text) > _LONGEST:  # the parser makes an object of each line
        raise EngineError(f"/metrics has more than {_LONGEST:,} characters; is this the engine?")
    try:
        families: Iterable[Metric] = list(text_string_to_metric_families(text))
    except ValueError as error:
        fault = shorten(str(error))
        raise EngineError(f"/metrics is not in the Prometheus format ({fault})") from error
    for family in families:
        for sample in family.samples:
            if sample.name.startswith(prefix):
                if not math.isfinite(sample.value):
                    raise EngineError(f"/metrics has {sample.name} = {sample.value}")
                name = sample.name.removeprefix(prefix).removesuffix("_total")
                found.setdefault(name, []).append((sample.labels, sample.value))
    return found


def block_counts(text: str, prefix: str) -> BlockCounts | None:
    """Return the speculative-decoding counters of vLLM or llama-server; None if it has none."""
    found = read_counters(text, prefix)
    if "spec_decode_num_drafts" not in found:
        return None

    def total(name: str) -> int:
        return round(sum(value for _, value in found.get(f"spec_decode_num_{name}", ())))

    by_position: dict[int, float] = {}
    for labels, value in found.get("spec_decode_num_accepted_tokens_per_pos", ()):
        text = labels.get("position", "")[:9]
        position = int(text) if text.isdecimal() else -1
        by_position[position] = by_position.get(position, 0) + value
    return BlockCounts(
        num_blocks=total("drafts"),
        num_drafted=total("draft_tokens"),
        num_accepted=total("accepted_tokens"),
        accepted_by_position=tuple(round(by_position[i]) for i in sorted(by_position)) or None,
    )


class VllmServer(CountingServer):
    """A `vllm serve`; no other client may use it during a measurement.

    Attributes:
        model: Name of the served model.
    """

    name, prefix = "vllm", "vllm:"
    conventions = Conventions(counts_behind_end=True)

    def __init__(self, client: Client, model: str | None = None) -> None:
        super().__init__(client)
        self.version = client.get("/version", Version).version
        models = served_models(client)
        if not models:
            raise EngineError(f"{client.url} serves no model")
        if model is not None and model not in models:
            shown = shorten(", ".join(models))
            raise EngineError(f"{client.url} serves {shown}, not {model}; name one of these")
        self.model = model or models[0]

    def ask(self, request: Request) -> list[int]:
        body = vllm_body(self.model, request) | {"ignore_eos": True}
        answer = self.client.post(_COMPLETIONS, body, _Completion)
        if not answer.choices:
            raise EngineError("vllm answered without a choice; the answer may be truncated")
        return checked_tokens(answer.choices[0].token_ids, request, self)

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
        self.version = client.get("/get_server_info", Version).version

    def serve(self, request: Request) -> Served:
        settings = {
            **sampling_keys(request.sampling),
            "max_new_tokens": request.max_new_tokens,
            "ignore_eos": True,
            "sampling_seed": request.seed,
        }
        body = {"input_ids": list(request.prompt), "sampling_params": settings}
        start = time.perf_counter()
        answer = self._client.post("/generate", body, _Generated)
        seconds = time.perf_counter() - start
        tokens = checked_tokens(answer.output_ids, request, self)
        return Served(tokens, seconds, _counted(answer.meta_info))

    def serve_together(self, requests: Sequence[Request], batch_size: int) -> Served:
        with ThreadPoolExecutor(batch_size) as pool:
            return together(list(pool.map(self.serve, requests)))


def _counted(meta: _Meta) -> BlockCounts | None:
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


class LlamaServer(CountingServer):
    """A llama-server with --metrics; no other client may use it during a measurement.

    Texts stop at end-of-text tokens: `ignore_eos` would forbid these tokens to the target but not
    to the draft, which changes acceptance.
    """

    name, prefix = "llamacpp", "llamacpp:"
    conventions = Conventions(ignores_end=False, counts_empty_blocks=False)

    def __init__(self, client: Client) -> None:
        super().__init__(client)
        self.version = client.get("/props", Properties).build_info
        self.counts()

    def ask(self, request: Request) -> list[int]:
        # time the whole prompt, with and without the draft
        body = llama_body(request) | {"cache_prompt": False}
        answer = self.client.post("/completion", body, _LlamaCompletion)
        return checked_tokens(answer.tokens, request, self)

    def counts(self) -> BlockCounts:
        """Block counts since the server started; 0 if it does not draft."""
        try:
            counts = super().counts() or BlockCounts()
        except StatusError as error:
            if error.status not in (404, 501):
                raise
            raise EngineError(
                f"{self.client.url} does not publish counters; start llama-server with --metrics"
            ) from error
        if counts.num_drafted >= _ROUNDED:
            raise EngineError(
                f"{self.client.url} has drafted {counts.num_drafted:,} tokens, and its /metrics "
                "rounds counters of this size to six digits; restart the server"
            )
        return counts


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


def stream_answer(client: Client, model: str, request: Request) -> TimedAnswer:
    """Answer a request up to its end-of-text token; raises EngineError.

    The server is started with `BLOCKS`.
    """
    body = vllm_body(model, request)
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    where = f"{client.url}{_COMPLETIONS}"
    tokens: list[int] = []
    blocks: list[tuple[int, int]] = []
    first_s, num_first, ended = 0.0, 0, False
    start = time.perf_counter()
    for data in client.stream(_COMPLETIONS, body):
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
    times = Times(seconds, first_s, len(tokens), num_first)
    return TimedAnswer(tokens, times, examined(blocks, len(tokens)))


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
