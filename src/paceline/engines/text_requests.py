"""Bodies of the requests that ask servers for texts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.engines import llamacpp

if TYPE_CHECKING:
    from paceline.engines.contract import Request

_NEUTRAL: dict[str, Any] = {"min_p": 0.0, "repetition_penalty": 1.0}
NEUTRAL_FORMS: tuple[dict[str, Any], ...] = (
    {"top_k": -1, **_NEUTRAL},  # SGLang
    {"top_k": 0, **_NEUTRAL, "repeat_penalty": 1.0},  # llama-cpp-python and others
    {},
)
"""Settings beyond OpenAI's that a server may take from its model if a request lacks them."""

_SEEDS = 2**31  # servers keep 32 bits of a seed


def openai_body(request: Request, top_logprobs: int, *, is_vllm: bool) -> dict[str, Any]:
    """The body for /v1/completions: every sampling setting of OpenAI, and all that vLLM knows."""
    sampling = request.sampling
    body: dict[str, Any] = {
        "prompt": list(request.prompt),
        "max_tokens": request.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": request.seed % _SEEDS,
    }
    if top_logprobs:
        body["logprobs"] = top_logprobs
    if is_vllm:
        body |= NEUTRAL_FORMS[0] | {"return_token_ids": True, "return_tokens_as_token_ids": True}
    if sampling.top_k:
        body["top_k"] = sampling.top_k
    return body


def llama_body(request: Request, top_logprobs: int) -> dict[str, Any]:
    """The body for llama-server's own endpoint."""
    return {
        "prompt": list(request.prompt),
        "n_predict": request.max_new_tokens,
        "seed": request.seed % _SEEDS,
        "return_tokens": True,
        "n_probs": top_logprobs,
        "post_sampling_probs": False,
        **llamacpp.sampling_keys(request.sampling),
    }
