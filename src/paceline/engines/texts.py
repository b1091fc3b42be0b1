"""Configuration of texts from servers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from paceline.config import HomePath, StrictModel
from paceline.engines.client import root_of

MAY_CHANGE = frozenset(
    f"writer.{name}"
    for name in ("url", "api_key_env", "concurrency", "timeout_s", "patience_s", "states_directory")
)
"""Settings of servers, in the configuration of a run, that may differ when it is resumed."""

Url = Annotated[str, Field(min_length=1)]


class OpenAIWriter(StrictModel):
    """Servers with an OpenAI-compatible completions endpoint that serve the same model.

    Attributes:
        url: URL of a server, or of several, which share the requests. A server that does not answer
            gets no requests until it answers again.
        model: Name of the model; None: the only one that the server serves.
        api_key_env: Environment variable that holds the API key.
        concurrency: Requests in flight per server.
        top_logprobs: Also record the K most likely tokens of each position with their log
            probabilities, to distil from (0: none). vLLM allows 20 unless it is started with
            --max-logprobs. They must be those before temperature and filters, so vLLM may not be
            started with --logprobs-mode processed_logprobs.
        hidden_states: Also record the hidden states that the head reads, rounded to bfloat16, of a
            vLLM that was started to write them (see the guide "A target behind a URL"). The target
            then needs its embeddings, last norm and head beside the tokenizer.
        states_directory: Where this machine has the files that the server writes them to; needed
            with `hidden_states`, and nothing else is read or removed.
        timeout_s: Timeout of a request.
        patience_s: How long to wait while no server answers.
    """

    kind: Literal["openai"] = "openai"
    url: Url | tuple[Url, ...]
    model: str | None = None
    api_key_env: str | None = None
    concurrency: int = Field(default=16, ge=1)
    top_logprobs: int = Field(default=0, ge=0)
    hidden_states: bool = False
    states_directory: HomePath | None = None
    timeout_s: float = Field(default=600.0, gt=0)
    patience_s: float = Field(default=300.0, ge=0)

    @field_validator("url")
    @classmethod
    def _are_roots(cls, url: str | tuple[str, ...]) -> str | tuple[str, ...]:
        found = [root_of(each) for each in ([url] if isinstance(url, str) else url)]
        if not found:
            raise ValueError("url is empty; give the URL of at least one server")
        if len(set(found)) < len(found):
            raise ValueError(f"url names a server twice: {', '.join(found)}")
        return url

    @model_validator(mode="after")
    def _states_have_a_place(self) -> OpenAIWriter:
        if self.hidden_states and self.states_directory is None:
            raise ValueError("hidden_states needs states_directory, where the server writes them")
        return self

    @property
    def urls(self) -> list[str]:
        """Roots of the servers, without /v1."""
        return [root_of(url) for url in ([self.url] if isinstance(self.url, str) else self.url)]
