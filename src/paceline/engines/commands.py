"""Command-line arguments of the engines' servers."""

from __future__ import annotations

import json
from typing import Literal, NamedTuple

from paceline.errors import UsageError

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
