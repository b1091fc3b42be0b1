"""What servers share: how they are started, asked for texts, and how their counters are read."""

from __future__ import annotations

import shlex
import time
from abc import abstractmethod
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel

from paceline.engines.answers import read_completion
from paceline.engines.client import said_by
from paceline.engines.contract import BlockCounts, Engine, Served, checked_tokens, together
from paceline.errors import EngineError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline.core.sampling import SamplingParams
    from paceline.engines.answers import Written
    from paceline.engines.client import Client
    from paceline.engines.contract import Drafting, Request, Setup


class Version(BaseModel):
    """What servers say of themselves; llama-server has `build_info`."""

    version: str = ""
    build_info: str = ""


class _Named(BaseModel):
    id: str


class _Models(BaseModel):
    data: list[_Named]


def served_models(client: Client) -> list[str]:
    """Names of the models that an OpenAI-compatible server serves."""
    return [model.id for model in client.get("/v1/models", _Models).data]


def openai_body(model: str, request: Request, top_logprobs: int) -> dict[str, Any]:
    """The settings of /v1/completions that every server knows."""
    return {
        "model": model,
        "prompt": list(request.prompt),
        "max_tokens": request.max_new_tokens,
        "temperature": request.sampling.temperature,
        "top_p": request.sampling.top_p,
        "seed": request.seed,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        **({"logprobs": top_logprobs} if top_logprobs else {}),
    }


def sampling_keys(sampling: SamplingParams) -> dict[str, Any]:
    """Every sampling setting, by the names of vLLM and SGLang."""
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
    }


class Server(Engine):
    """A server. The class itself stands for one with OpenAI's completions endpoint alone."""

    program: ClassVar[tuple[str, ...]]  # starts it
    target_flags: ClassVar[tuple[str, ...]] = ()  # before the path of the target
    length_flag: ClassVar[str]  # for the context length
    size_flag: ClassVar[str]  # for the number of concurrent requests
    version_path: ClassVar[str]  # of the request for its version
    recorded_as: ClassVar[str] = ""  # its name in records of texts
    text_path: ClassVar[str] = "/v1/completions"  # of the request for a text

    def __init__(self, client: Client, model: str | None = None) -> None:
        del model  # its name, if the server serves several
        self.client = client
        self.version = self.version_of(client)

    @classmethod
    def version_of(cls, client: Client) -> str:
        """Its version; raises EngineError if the server does not answer like this one."""
        found = client.get(cls.version_path, Version)
        return found.version or found.build_info

    @classmethod
    def arguments(cls, setup: Setup, port: int) -> list[str]:
        """Arguments that start it on 127.0.0.1; raises UsageError for a path that is an option."""
        found = [*cls.models(setup.target, setup.drafting), "--host", "127.0.0.1"]
        found += ["--port", str(port), *cls.capacity(setup)]
        return found + ([] if setup.dtype == "auto" else cls.dtype(setup.dtype))

    @classmethod
    def models(cls, target: str, drafting: Drafting | None) -> list[str]:
        """Arguments for target and draft; raises UsageError for a path that is an option."""
        target = _expanded(target)
        if drafting is not None:
            drafting = drafting._replace(draft=_expanded(drafting.draft))
        for path in (target, drafting.draft if drafting else ""):
            if path.startswith("-"):
                raise UsageError(f"the model {path} would be an option of the engine; name a model")
        return [*cls.target_flags, target, *(cls.draft(drafting) if drafting else ())]

    @classmethod
    @abstractmethod
    def draft(cls, drafting: Drafting) -> list[str]:
        """Arguments for speculative decoding."""

    @classmethod
    def capacity(cls, wanted: Setup) -> list[str]:
        """By default, every server admits one request; SGLang's limit is 48 when it drafts."""
        size = [cls.size_flag, str(wanted.batch_size)] if wanted.batch_size > 1 else []
        return [cls.length_flag, str(wanted.length), *size]

    @classmethod
    def dtype(cls, dtype: str) -> list[str]:
        """Arguments for the compute dtype."""
        return ["--dtype", dtype]

    @classmethod
    def environment(cls, rule: str) -> dict[str, str]:
        """Environment variables under a rule of the plugin, or ""."""
        del rule
        return {}

    @classmethod
    def check_started(cls, setup: Setup, logged: Callable[[str], bool]) -> None:
        """Raise EngineError if it has started otherwise; `logged`: whether its log has a text."""

    @classmethod
    def launch(cls, target: str, drafting: Drafting, model_class: str) -> str:
        del model_class
        return shlex.join([*cls.program, *cls.models(target, drafting)])

    @classmethod
    def tokenize_body(cls, text: str) -> dict[str, Any]:
        """Body of the request that tokenizes a text without special tokens, if it has one."""
        return {"prompt": text}

    @classmethod
    def text_body(cls, model: str, request: Request, top_logprobs: int) -> dict[str, Any]:
        """Body of the request for a text with this number of log probabilities."""
        top_k = request.sampling.top_k
        return openai_body(model, request, top_logprobs) | ({"top_k": top_k} if top_k else {})

    @classmethod
    def read_text(cls, body: str, where: str, server: str, top_logprobs: int) -> Written:
        """Read the answer of a server with this name and version, or raise AnswerError."""
        return read_completion(body, where, server, top_logprobs)


class CountingServer(Server):
    """A server with cumulative counters; no other client may use it during a measurement.

    vLLM and llama-server publish them at /metrics in the Prometheus text format, so a measurement
    is the difference of two readings.

    Attributes:
        prefix: Of the names of its counters.
    """

    prefix: ClassVar[str]

    def serve(self, request: Request) -> Served:
        return self.serve_together([request], 1)

    def serve_together(self, requests: Sequence[Request], batch_size: int) -> Served:
        before = self.counts()
        start = time.perf_counter()
        with ThreadPoolExecutor(batch_size) as pool:
            answers = together(list(pool.map(self._timed, requests)))
        wall_s = time.perf_counter() - start
        after = None if before is None else self.settled(before) - before
        return answers._replace(blocks=after, wall_s=wall_s)

    def _timed(self, request: Request) -> Served:
        start = time.perf_counter()
        found = self.client.ask("POST", self.text_path, self.body(request))
        seconds = time.perf_counter() - start
        tokens = self.read_text(found, f"{self.client.url}{self.text_path}", "", 0).tokens or []
        return Served(checked_tokens(tokens, request, self), seconds, None)

    @abstractmethod
    def body(self, request: Request) -> dict[str, Any]:
        """Body of a measured request."""

    def counts(self) -> BlockCounts | None:
        """Block counts since the server started; None if it has no such counters."""
        return block_counts(self.client.ask("GET", "/metrics"), self.prefix)

    def settled(self, before: BlockCounts) -> BlockCounts:
        """Return the counters once they include all answers."""
        return self.counts() or before


def _expanded(path: str) -> str:
    """The path with the home directory in it; no shell reads what the engine is given."""
    return str(Path(path).expanduser()) if path.startswith("~") else path


def block_counts(text: str, prefix: str) -> BlockCounts | None:
    """Return the speculative-decoding counters of vLLM or llama-server; None if it has none."""
    from prometheus_client.parser import text_string_to_metric_families

    prefix = f"{prefix}spec_decode_num_"
    totals: dict[str, float] = {}
    by_position: dict[str, float] = {}
    try:
        for family in text_string_to_metric_families(text):
            for name, labels, value, *_ in family.samples:
                if not name.startswith(prefix):
                    continue
                counter = name.removeprefix(prefix).removesuffix("_total")
                totals[counter] = totals.get(counter, 0) + value
                if counter == "accepted_tokens_per_pos":
                    position = labels.get("position", "")
                    by_position[position] = by_position.get(position, 0) + value
    except ValueError as error:
        fault = said_by(str(error))
        raise EngineError(f"/metrics is not in the Prometheus format ({fault})") from error
    if "drafts" not in totals:
        return None
    positions = [str(place) for place in range(len(by_position))]
    known = bool(by_position) and by_position.keys() == set(positions)
    return BlockCounts(
        num_blocks=round(totals["drafts"]),
        num_drafted=round(totals.get("draft_tokens", 0)),
        num_accepted=round(totals.get("accepted_tokens", 0)),
        accepted_by_position=tuple(round(by_position[p]) for p in positions) if known else None,
    )
