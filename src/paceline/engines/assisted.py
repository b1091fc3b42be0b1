"""transformers' assisted generation, in this process."""

from __future__ import annotations

import time
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers.generation.candidate_generator import AssistedCandidateGenerator

from paceline.engines.contract import BlockCounts, Engine, Request, Served, checked_tokens

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.models import CausalModel


class Transformers(Engine):
    """`generate` of a target, with a draft as its assistant or alone."""

    name = "transformers"
    version = transformers.__version__

    def __init__(self, target: CausalModel, draft: CausalModel | None, gamma: int) -> None:
        self._target: Any = target.hf
        self._draft: Any = None if draft is None else draft.hf
        if draft is not None:
            settings: Any = self._draft.generation_config
            # read from the assistant's own settings, not from the arguments of generate
            settings.num_assistant_tokens = gamma
            settings.num_assistant_tokens_schedule = "constant"
            settings.assistant_confidence_threshold = 0.0

    def serve(self, request: Request) -> Served:
        sampling = request.sampling
        settings: dict[str, Any] = {
            "max_new_tokens": request.max_new_tokens,
            "min_new_tokens": request.max_new_tokens,
            "do_sample": sampling.temperature > 0,
            "repetition_penalty": sampling.repetition_penalty,
            "eos_token_id": None,
        }
        if sampling.temperature > 0:
            settings |= {
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k,
            }
        tokens = torch.tensor([list(request.prompt)], device=self._target.device)
        torch.manual_seed(request.seed)
        start = time.perf_counter()
        with torch.inference_mode(), _counting() as matches, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            written = self._target.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                assistant_model=self._draft,
                **settings,
            )
        seconds = time.perf_counter() - start
        answer = checked_tokens(written[0, tokens.shape[1] :].tolist(), request, "transformers")
        return Served(answer, seconds, None if self._draft is None else _counts(matches))


@contextmanager
def _counting() -> Iterator[list[tuple[int, int]]]:
    """Drafted and kept tokens of each block, gathered while the context is open."""
    found: list[tuple[int, int]] = []
    original = AssistedCandidateGenerator.update_candidate_strategy

    def counted(self: Any, input_ids: Any, scores: Any, num_matches: Any) -> Any:
        found.append((scores.shape[1] - 1, int(num_matches)))
        return original(self, input_ids, scores, num_matches)

    AssistedCandidateGenerator.update_candidate_strategy = counted
    try:
        yield found
    finally:
        AssistedCandidateGenerator.update_candidate_strategy = original


def _counts(matches: list[tuple[int, int]]) -> BlockCounts:
    longest = max((drafted for drafted, _ in matches), default=0)
    return BlockCounts(
        num_blocks=len(matches),
        num_drafted=sum(drafted for drafted, _ in matches),
        num_accepted=sum(kept for _, kept in matches),
        accepted_by_position=tuple(
            sum(kept > place for _, kept in matches) for place in range(longest)
        ),
    )
