"""Errors of servers that write text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.engines.client import advice_for, shorten
from paceline.errors import EngineError, UsageError

if TYPE_CHECKING:
    import openai

    from paceline.engines.text_config import OpenAIWriter

KEY_SETTING = "writer.api_key_env"


class UnavailableError(EngineError):
    """The server does not answer, or refuses for now."""


class RefusedError(UsageError):
    """The server refuses the content of a request."""


def refusal(
    where: str, error: openai.APIStatusError, writer: OpenAIWriter
) -> EngineError | UsageError:
    """The error for an answer with this status."""
    status = error.status_code
    advice = advice_for(status, KEY_SETTING)
    if status == 401 and writer.api_key_env is not None:
        advice = f"the API key in {writer.api_key_env} is not the server's"
    if status == 400 and writer.top_logprobs:
        advice = "lower writer.top_logprobs, or start vLLM with a higher --max-logprobs"
    message = f"{where} answered {status} ({shorten(error.response.text)})"
    return by_status(f"{message}; {advice}" if advice else message, status)


def by_status(message: str, status: int) -> EngineError | UsageError:
    """Statuses that may pass make a server unavailable, and the others are errors of the user."""
    if status in (408, 409, 425, 429) or status >= 500:
        return UnavailableError(message)
    return RefusedError(message) if status in (400, 422) else UsageError(message)


def processed(where: str, sign: str) -> UsageError:
    """The error for log probabilities after temperature or filters."""
    return UsageError(
        f"{where} gives log probabilities after temperature, top-k and top-p, which are not the "
        f"target's ({sign}); start vLLM with --logprobs-mode raw_logprobs, and llama-server behind "
        "nothing that sets post_sampling_probs"
    )
