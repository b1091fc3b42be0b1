"""The arguments that servers take: which target, which draft, how many tokens per block."""

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
    "sglang": ("python", "-m", "sglang.launch_server"),
    "llamacpp": ("llama-server",),
}
"""How each is started."""


class Drafting(NamedTuple):
    """How an engine drafts.

    Attributes:
        draft: What the engine is given as draft.
        gamma: Tokens drafted per block.
        sampling: How vLLM draws them; the others draft greedily.
    """

    draft: str
    gamma: int
    sampling: DraftSampling = "greedy"


class Room(NamedTuple):
    """What a server makes room for.

    Attributes:
        length: Tokens of the longest request.
        batch_size: Requests at a time.
    """

    length: int
    batch_size: int = 1


def target_arguments(engine: Server, target: str) -> list[str]:
    """What it serves."""
    return {
        "vllm": [target],
        "sglang": ["--model-path", target],
        "llamacpp": ["-m", target],
    }[engine]


def draft_arguments(engine: Server, drafting: Drafting) -> list[str]:
    """What it drafts with."""
    draft, gamma = drafting.draft, drafting.gamma
    if engine == "vllm":
        settings = {
            "method": "draft_model",
            "model": draft,
            "num_speculative_tokens": gamma,
            "draft_sample_method": drafting.sampling,
        }
        return ["--speculative-config", json.dumps(settings)]
    if engine == "sglang":
        # The root of a block counts as a drafted token there.
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
    """Room for so many requests at a time, and counters to read."""
    length, size = room
    if engine == "llamacpp":  # its tokens are of all requests together
        return ["-c", str(length * size), "-np", str(size), "--metrics"]
    flags = {"vllm": ("--max-model-len", "--max-num-seqs")}
    flags |= {"sglang": ("--context-length", "--max-running-requests")}
    length_flag, size_flag = flags[engine]
    # alone, the server's own limit is as good; SGLang's is 48 where it drafts
    return [length_flag, str(length), *([size_flag, str(size)] if size > 1 else [])]


def dtype_arguments(engine: Server, dtype: str) -> list[str]:
    """What it computes in; auto: its own choice. llama.cpp's weights are as their file has them."""
    if dtype == "auto":
        return []
    if engine == "llamacpp":
        cache = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}[dtype]
        return ["-ctk", cache, "-ctv", cache]
    return ["--dtype", dtype]


def check_draft_path(engine: EngineName, draft: str) -> None:
    """Will the engine take the draft for what it is?

    Raises:
        UsageError: vLLM tells some methods by a draft's path, whatever method is asked for.
    """
    for name in _OTHER_METHODS:
        if engine == "vllm" and name in draft.lower():
            raise UsageError(
                f"vLLM takes a draft whose path contains {name!r} for a draft of that method, and {draft} "
                "does; choose another path"
            )
