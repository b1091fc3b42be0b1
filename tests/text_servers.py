"""Servers that write with a tiny target, as vLLM, llama-server and others answer."""

import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from engine_servers import Answer
from paceline.core.sampling import SamplingParams
from paceline.decode import AutoregressiveDecoder
from paceline.models import HfModel, load_model, prepare_for_decoding
from paceline.models.contract import Texts
from paceline.models.loading import load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable

    Process: TypeAlias = Callable[[torch.Tensor, dict[str, Any]], torch.Tensor]
    """What it makes of log probabilities, for a request's body."""


class Served:
    """A server with the target; `faults` are its next answers instead of texts."""

    def __init__(self, folder: Path, *, kind: str = "vllm") -> None:
        self.model: HfModel = prepare_for_decoding(load_model(folder / "target", dtype="float32"))
        self.kind = kind
        self.bodies: list[dict[str, Any]] = []
        self.faults: list[Answer] = []
        self.tokens_of: Any = load_tokenizer(folder / "target")
        self.lock = threading.Lock()
        self.omitted = 0  # first tokens of an answer without candidates, of llama-server
        self.process: Process = lambda log_probs, _: log_probs

    @property
    def routes(self) -> dict[str, Any]:
        about: dict[str, Any] = {
            "vllm": {"/version": lambda _: (200, {"version": "0.32.0"})},
            "llama.cpp": {"/props": lambda _: (200, {"build_info": "b1-abc"})},
            "other": {},
        }[self.kind]
        return {
            **about,
            "/v1/models": lambda _: (200, {"data": [{"id": "served"}]}),
            "/tokenize": self.tokenize,
            "/completion" if self.kind == "llama.cpp" else "/v1/completions": self.complete,
        }

    def tokenize(self, body: dict[str, Any]) -> Answer:
        text = body["prompt"] if self.kind == "vllm" else body["content"]
        return 200, {"tokens": self.tokens_of(text, add_special_tokens=False)["input_ids"]}

    def complete(self, body: dict[str, Any]) -> Answer:
        with self.lock:
            self.bodies.append(body)
            if self.faults:
                return self.faults.pop(0)
            sampling = SamplingParams(temperature=body["temperature"], top_p=body["top_p"])
            decoder = AutoregressiveDecoder(self.model, sampling)
            count = body["n_predict" if self.kind == "llama.cpp" else "max_tokens"]
            (found,) = decoder.generate([body["prompt"]], count, body["seed"])
            text = self.tokens_of.decode(found.tokens, skip_special_tokens=True)
            ended = found.stop_reason == "eos"
            top = body.get("n_probs" if self.kind == "llama.cpp" else "logprobs")
            candidates = self.logprobs(body, found.tokens, top) if top else []
            if self.kind == "llama.cpp":
                assert body["return_tokens"]
                return 200, {
                    "content": text,
                    "tokens": found.tokens,
                    "stop_type": "eos" if ended else "limit",
                    "completion_probabilities": [
                        {"id": token, "top_logprobs": [{"id": i, "logprob": v} for i, v in row]}
                        for token, row in zip(found.tokens, candidates, strict=bool(top))
                    ][self.omitted :],
                }
            assert body["model"] == "served"
            choice: dict[str, Any] = {"text": text, "finish_reason": "stop" if ended else "length"}
            if self.kind == "vllm":
                choice["token_ids"] = found.tokens
            if top:
                rows = [{f"token_id:{i}": value for i, value in row} for row in candidates]
                choice["logprobs"] = {"top_logprobs": rows}
            return 200, {"choices": [choice]}

    def logprobs(
        self, body: dict[str, Any], tokens: list[int], top: int
    ) -> list[list[tuple[int, float]]]:
        log_probs = log_probs_of(self.model, body["prompt"], tokens)
        values, ids = self.process(log_probs, body).topk(top)
        return [
            list(zip(i, v, strict=True)) for i, v in zip(ids.tolist(), values.tolist(), strict=True)
        ]


def top_of(
    model: HfModel, prompt: list[int], tokens: list[int], top: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The highest log probabilities before each token, and their ids."""
    values, ids = log_probs_of(model, prompt, tokens).topk(top)
    return values, ids


def log_probs_of(model: HfModel, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """Log probabilities of all tokens before each of these."""
    text = torch.tensor([[*prompt, *tokens]])
    with torch.no_grad():
        logits = model.plain_logits(Texts(text))[0, len(prompt) - 1 : -1]
    return logits.float().log_softmax(-1)
