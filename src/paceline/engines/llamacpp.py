"""llama-server of llama.cpp.

Texts are asked for at its own endpoint: its OpenAI endpoint omits tokens that end within a
character.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel

from paceline.engines.answers import AnswerError, StopReason, Token, Written, most_likely
from paceline.engines.client import StatusError, parsed
from paceline.engines.contract import BlockCounts
from paceline.engines.servers import CountingServer
from paceline.errors import EngineError

if TYPE_CHECKING:
    from paceline.engines.client import Client
    from paceline.engines.contract import Drafting, Request, Setup

_CHARACTER = 4  # the most tokens of one character


class _Candidate(BaseModel):
    id: Token
    logprob: float


class _Entry(BaseModel):
    id: Token
    top_logprobs: list[_Candidate] = []


class _Completion(BaseModel):
    content: str
    tokens: list[Token]
    stop_type: Literal["eos", "word", "limit"]
    completion_probabilities: list[_Entry] = []


class LlamaServer(CountingServer):
    """A llama-server with --metrics; no other client may use it during a measurement.

    Texts stop at end-of-text tokens: `ignore_eos` would forbid these tokens to the target but not
    to the draft, which changes acceptance.
    """

    name, title = "llamacpp", "llama.cpp"
    prefix = "llamacpp:"
    ignores_end = False
    counts_empty_blocks = False
    program, target_flags = ("llama-server",), ("-m",)
    version_path = "/props"
    recorded_as, text_path = "llama.cpp", "/completion"
    loads_gguf = True

    def __init__(self, client: Client, model: str | None = None) -> None:
        super().__init__(client, model)
        self.counts()

    @classmethod
    def draft(cls, drafting: Drafting) -> list[str]:
        # Without --spec-type the server loads the draft and does not use it.
        return [
            *("-md", drafting.draft, "--spec-type", "draft-simple"),
            *("--spec-draft-n-max", str(drafting.gamma), "--spec-draft-p-min", "0"),
        ]

    @classmethod
    def capacity(cls, wanted: Setup) -> list[str]:
        """Also /metrics; -c is the total over all requests."""
        size = wanted.batch_size
        return ["-c", str(wanted.length * size), "-np", str(size), "--metrics"]

    @classmethod
    def dtype(cls, dtype: str) -> list[str]:
        """The dtype of the KV cache."""
        cache = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}[dtype]
        return ["-ctk", cache, "-ctv", cache]

    @classmethod
    def tokenize_body(cls, text: str) -> dict[str, Any]:
        return {"content": text, "add_special": False}

    @classmethod
    def text_body(cls, model: str, request: Request, top_logprobs: int) -> dict[str, Any]:
        """With the samplers in Paceline's order: temperature, top-k, top-p."""
        del model
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
            "n_probs": top_logprobs,
            "post_sampling_probs": False,
        }

    @classmethod
    def read_text(cls, body: str, where: str, server: str, top_logprobs: int) -> Written:
        found = parsed(body, _Completion, where, AnswerError)
        top = None
        if top_logprobs:
            top = []
            entries = iter(found.completion_probabilities)
            entry = next(entries, None)
            for index, token in enumerate(found.tokens):
                if entry is None or entry.id != token:
                    top.append([])
                    continue
                row = [(candidate.id, candidate.logprob) for candidate in entry.top_logprobs]
                top.append(most_likely(row, top_logprobs, index, where))
                entry = next(entries, None)
            if entry is not None or (len(found.tokens) >= _CHARACTER and not any(top)):
                raise AnswerError(
                    f"{where} answered with {len(found.tokens)} tokens and other log "
                    f"probabilities, of {len(found.completion_probabilities)}"
                )
        reason: StopReason = "length" if found.stop_type == "limit" else "eos"
        return Written(found.content, found.tokens, reason, server, top)

    def body(self, request: Request) -> dict[str, Any]:
        # time the whole prompt, with and without the draft
        return self.text_body("", request, 0) | {"cache_prompt": False}

    def counts(self) -> BlockCounts:
        """Block counts since the server started; 0 if it does not draft."""
        try:
            return super().counts() or BlockCounts()
        except StatusError as error:
            if error.status not in (404, 501):
                raise
            raise EngineError(
                f"{self.client.url} does not publish counters; start llama-server with --metrics"
            ) from error
