"""Bodies of the requests that ask servers for texts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.engines import llamacpp

if TYPE_CHECKING:
    from paceline.engines.contract import Request

_SEEDS = 2**31  # servers keep 32 bits of a seed


def openai_body(request: Request, top_logprobs: int, *, is_vllm: bool) -> dict[str, Any]:
    """The body for /v1/completions.

    With every sampling setting: the server's defaults come from the model's files.
    """
    sampling = request.sampling
    body: dict[str, Any] = {
        "prompt": list(request.prompt),
        "max_tokens": request.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "seed": request.seed % _SEEDS,
    }
    if top_logprobs:
        body["logprobs"] = top_logprobs
    if sampling.top_k or is_vllm:
        body["top_k"] = sampling.top_k or -1  # all tokens
    if is_vllm:
        body |= {"min_p": 0.0, "repetition_penalty": 1.0}
        body |= {"return_token_ids": True, "return_tokens_as_token_ids": True}
    return body


def llama_body(request: Request, top_logprobs: int) -> dict[str, Any]:
    """The body for llama-server's own endpoint."""
    return {
        "prompt": list(request.prompt),
        "n_predict": request.max_new_tokens,
        "seed": request.seed % _SEEDS,
        "return_tokens": True,
        "n_probs": top_logprobs,
        **llamacpp.sampling_keys(request.sampling),
    }
