"""Configuration of an engine, and the command that starts its server."""

from __future__ import annotations

import json
import os
import shlex
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

from pydantic import Field, ValidationInfo, model_validator

from paceline.config import StrictModel
from paceline.core.sampling import SamplingParams
from paceline.engines.client import KeyVariable, root_of
from paceline.errors import UsageError
from paceline.permissions import PROGRAMS as ALLOWED
from paceline.permissions import Origin, allowed, is_given

if TYPE_CHECKING:
    from collections.abc import Mapping


EngineName = Literal["vllm", "sglang", "llamacpp", "transformers"]
Server = Literal["vllm", "sglang", "llamacpp"]
DraftSampling = Literal["greedy", "probabilistic"]

_OTHER_METHODS = ("eagle-", "eagle3", "dflash", "dspark")

PROGRAMS: dict[Server, tuple[str, ...]] = {
    "vllm": ("vllm", "serve"),
    "sglang": ("python", "-I", "-m", "sglang.launch_server"),
    "llamacpp": ("llama-server",),
}
"""Command that starts each server."""

RULE_VARIABLE = "PACELINE_RULE"
"""Environment variable that gives Paceline's plugin of vLLM its rule."""

RULE_IS_SET = "paceline: drafts are judged by"
"""Beginning of the line that the plugin logs when it has set the rule."""


class Drafting(NamedTuple):
    """Drafting configuration of a server.

    Attributes:
        draft: Path or hub name of the draft.
        gamma: Tokens drafted per block.
        sampling: How vLLM samples drafts; the other servers draft greedily.
        rule: Rule for Paceline's plugin of vLLM, as JSON; None: the server's own.
    """

    draft: str
    gamma: int
    sampling: DraftSampling = "greedy"
    rule: str | None = None


class Room(NamedTuple):
    """Capacity of a server.

    Attributes:
        length: Context length in tokens.
        batch_size: Concurrent requests.
    """

    length: int
    batch_size: int = 1


def target_arguments(engine: Server, target: str) -> list[str]:
    """Arguments for the model to serve; raises UsageError for a path that is an option."""
    if target.startswith("-"):
        raise UsageError(f"the target {target} would be an option of {engine}; name a model")
    return {
        "vllm": [target],
        "sglang": ["--model-path", target],
        "llamacpp": ["-m", target],
    }[engine]


def draft_arguments(engine: Server, drafting: Drafting) -> list[str]:
    """Arguments for speculative decoding."""
    draft, gamma = drafting.draft, drafting.gamma
    if draft.startswith("-"):
        raise UsageError(f"the draft {draft} would be an option of {engine}; name a model")
    if engine == "vllm":
        settings = {
            "method": "draft_model",
            "model": draft,
            "num_speculative_tokens": gamma,
            "draft_sample_method": drafting.sampling,
        }
        return ["--speculative-config", json.dumps(settings)]
    if engine == "sglang":
        # SGLang counts the root of a block as a drafted token.
        return [
            *("--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", draft),
            *("--speculative-num-steps", str(gamma), "--speculative-eagle-topk", "1"),
            *("--speculative-num-draft-tokens", str(gamma + 1)),
        ]
    # Without --spec-type the server loads the draft and does not use it.
    return [
        *("-md", draft, "--spec-type", "draft-simple"),
        *("--spec-draft-n-max", str(gamma), "--spec-draft-p-min", "0"),
    ]


def room_arguments(engine: Server, room: Room) -> list[str]:
    """Arguments for context length and concurrency; for llama.cpp also for /metrics."""
    length, size = room
    if engine == "llamacpp":  # -c is the total over all requests
        return ["-c", str(length * size), "-np", str(size), "--metrics"]
    flags = {"vllm": ("--max-model-len", "--max-num-seqs")}
    flags |= {"sglang": ("--context-length", "--max-running-requests")}
    length_flag, size_flag = flags[engine]
    # Every server's default admits one request; SGLang's limit is 48 when it drafts.
    return [length_flag, str(length), *([size_flag, str(size)] if size > 1 else [])]


def dtype_arguments(engine: Server, dtype: str) -> list[str]:
    """Arguments for the compute dtype; auto: none. For llama.cpp, the dtype of the KV cache."""
    if dtype == "auto":
        return []
    if engine == "llamacpp":
        cache = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}[dtype]
        return ["-ctk", cache, "-ctv", cache]
    return ["--dtype", dtype]


def check_draft_path(engine: EngineName, draft: str) -> None:
    """Raise UsageError if vLLM would infer another drafting method from the draft's path."""
    for name in _OTHER_METHODS:
        if engine == "vllm" and name in draft.lower():
            raise UsageError(
                f"vLLM infers another drafting method from {name!r} in the path {draft}; choose "
                "another path"
            )


_GREEDY = SamplingParams(temperature=0.0)


def proposals_of(
    engine: EngineName, drafting: DraftSampling, sampling: SamplingParams
) -> SamplingParams:
    """Sampling parameters that the engine applies to the draft.

    transformers passes the target's logits processors to the draft, whose own `generate` adds them
    again: logits are divided by the temperature twice. vLLM's probabilistic drafting applies the
    temperature, but neither top-k nor top-p.

    Args:
        engine: The engine that drafts.
        drafting: Its draft sampling; used for vLLM only.
        sampling: Sampling parameters of the request.
    """
    if engine == "transformers":
        return sampling.model_copy(update={"temperature": sampling.temperature**2})
    if drafting == "probabilistic":
        return SamplingParams(temperature=sampling.temperature)
    return _GREEDY


_GPUS = "CUDA_VISIBLE_DEVICES"


class EngineChoice(StrictModel):
    """An engine: the URL of a running server, or how to start one.

    Attributes:
        engine: The engine.
        url: URL of a running server; None: start one.
        model: Name of the model, if the server serves several.
        api_key_env: Environment variable that holds the server's API key.
        program: Program to start: vllm, llama-server, or the python of SGLang; None: from the PATH.
        options: More arguments of the server.
        target: Directory or GGUF file that the engine loads as target; None: the target itself.
        draft: Directory or GGUF file that the engine loads as draft; None: the draft itself.
        start_seconds: Timeout for starting the server.
    """

    engine: EngineName
    url: str | None = None
    model: str | None = None
    api_key_env: KeyVariable = None
    program: str | None = None
    options: tuple[str, ...] = ()
    target: str | None = None
    draft: str | None = None
    start_seconds: float = Field(default=900.0, gt=0)

    @model_validator(mode="before")
    @classmethod
    def _starts_what_the_user_permits(cls, values: Any, info: ValidationInfo) -> Any:
        if info.context is not Origin.CONFIGURATION or not isinstance(values, dict):
            return values
        known = cast("dict[str, Any]", values)
        program = (
            known.get("program") or PROGRAMS.get(cast("Any", str(known.get("engine"))), ("",))[0]
        )
        of_file = [key for key in ("program", "options") if not is_given(known.get(key))]
        if of_file and program not in allowed(ALLOWED):
            raise ValueError(
                f"a file may not set the {of_file[0]} of an engine by itself "
                f"({known[of_file[0]]}); if you trust it, add --allow-program "
                f"{shlex.quote(str(program))}"
            )
        return known

    @model_validator(mode="after")
    def _one_way(self) -> EngineChoice:
        if self.url is not None:
            root_of(self.url)
        if self.url is not None and (self.program or self.options):
            raise ValueError("url names a running server; leave program and options out")
        if self.engine == "transformers" and self.url is not None:
            raise ValueError("transformers runs in this process and has no url")
        if any(option.replace("_", "-").startswith("--api-key") for option in self.options):
            raise ValueError(
                "engine.options is recorded with the result, so it may not hold an API key; a "
                "server that Paceline starts needs none"
            )
        return self


class Setup(NamedTuple):
    """Launch configuration of a server.

    Attributes:
        target: Path or hub name of the target.
        drafting: Speculative decoding; None: off.
        room: Capacity.
        dtype: Compute dtype; auto: the server's default.
        gpu: The only visible GPU that the server uses; None: all.
    """

    target: str
    drafting: Drafting | None
    room: Room
    dtype: str = "auto"
    gpu: int | None = None


def server_command(choice: EngineChoice, setup: Setup, port: int) -> list[str]:
    """Return the command that starts the server on 127.0.0.1."""
    engine = choice.engine
    assert engine != "transformers", "not a server"
    program, *first = PROGRAMS[engine]
    command = [choice.program or program, *first, *target_arguments(engine, setup.target)]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    command += room_arguments(engine, setup.room)
    command += dtype_arguments(engine, setup.dtype)
    if setup.drafting is not None:
        command += draft_arguments(engine, setup.drafting)
    return [*command, *choice.options]


def server_environment(choice: EngineChoice, setup: Setup) -> Mapping[str, str]:
    """Return the environment variables to set for the server."""
    found = {"HF_HUB_OFFLINE": "1"} if os.environ.get("HF_HUB_OFFLINE") else {}
    if setup.gpu is not None:
        visible = os.environ.get(_GPUS)
        found[_GPUS] = visible.split(",")[setup.gpu] if visible else str(setup.gpu)
    if choice.engine != "vllm":
        return found
    rule = None if setup.drafting is None else setup.drafting.rule
    if rule:
        found["VLLM_LOGGING_LEVEL"] = "INFO"  # `running` looks for the plugin's line
    return {**found, "VLLM_NO_USAGE_STATS": "1", RULE_VARIABLE: rule or ""}
