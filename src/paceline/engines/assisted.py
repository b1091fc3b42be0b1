"""Assisted generation of transformers, in this process."""

from __future__ import annotations

import time
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from paceline.engines.contract import (
    BlockCounts,
    Engine,
    Request,
    Served,
    checked_tokens,
    together,
)
from paceline.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paceline.core.sampling import SamplingParams
    from paceline.engines.contract import Drafting, DraftSampling
    from paceline.models import HfModel


def assisted_settings(gamma: int) -> dict[str, Any]:
    """Settings with which the assistant of transformers drafts `gamma` tokens in every block."""
    return {
        "num_assistant_tokens": gamma,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.0,
    }


class Transformers(Engine):
    """Runs `generate` of a target, with a draft as the assistant model or without one.

    Ignores both models' generation_config: each request sets every sampling parameter. It drafts
    for one text at a time, and for encoder-decoders, too.
    """

    name = title = "transformers"
    in_process = True
    drafts_first_token = True

    def __init__(self, target: HfModel, draft: HfModel | None, gamma: int) -> None:
        import transformers

        self.version = transformers.__version__
        self._target: Any = target.hf
        self._draft: Any = None if draft is None else draft.hf
        self._gamma = gamma
        models = (self._target,) if draft is None else (self._target, self._draft)
        if len({hf.config.get_text_config(decoder=True).vocab_size for hf in models}) > 1:
            raise UsageError(
                "transformers drafts only for a target with as many rows of logits; export the "
                "draft with --to transformers, and give the export as --draft"
            )

    def serve(self, request: Request) -> Served:
        import transformers

        tokens = torch.tensor([list(request.prompt)], device=self._target.device)
        sampling = request.sampling
        names = () if sampling.greedy else ("temperature", "top_p", "top_k")
        settings = transformers.GenerationConfig(
            max_new_tokens=request.max_new_tokens,
            do_sample=not sampling.greedy,
            **{name: getattr(sampling, name) for name in names},
        )
        start = time.perf_counter()
        with (
            _seeded(request.seed),
            torch.inference_mode(),
            self._without_defaults(),
            _counting() as matches,
        ):
            output = self._target.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                assistant_model=self._draft,
                generation_config=settings,
            )
        seconds = time.perf_counter() - start
        answer = checked_tokens(output[0, tokens.shape[1] :].tolist(), request, self)
        return Served(answer, seconds, None if self._draft is None else _counts(matches))

    def serve_together(self, requests: Sequence[Request], batch_size: int) -> Served:
        assert batch_size == 1, "assisted generation supports batch size 1 only"
        return together([self.serve(request) for request in requests])

    @classmethod
    def launch(cls, target: str, drafting: Drafting, model_class: str) -> str:
        return (
            f"from transformers import {model_class}, AutoTokenizer\n"
            f"tokenizer = AutoTokenizer.from_pretrained({target!r})\n"
            f"target = {model_class}.from_pretrained({target!r})\n"
            f"draft = {model_class}.from_pretrained({drafting.draft!r})"
            f"  # drafts {drafting.gamma} tokens per block\n"
            'inputs = tokenizer("A prompt", return_tensors="pt")\n'
            "tokens = target.generate(**inputs, assistant_model=draft, max_new_tokens=128)\n"
            "text = tokenizer.decode(tokens[0])"
        )

    @classmethod
    def proposals(cls, drafting: DraftSampling, sampling: SamplingParams) -> SamplingParams:
        """It passes the target's logits processors to the draft, whose `generate` adds them again.

        So logits are divided by the temperature twice.
        """
        del drafting
        return sampling.model_copy(update={"temperature": sampling.temperature**2})

    @contextmanager
    def _without_defaults(self) -> Iterator[None]:
        """Replace both models' generation_config while the context is open.

        transformers fills unset request settings, such as eos_token_id, from either model's config
        and reads the number of drafted tokens from the assistant's.
        """
        from transformers import GenerationConfig

        drafting = GenerationConfig(**assisted_settings(self._gamma))
        clean = [(self._target, GenerationConfig())]
        clean += [] if self._draft is None else [(self._draft, drafting)]
        before = [hf.generation_config for hf, _ in clean]
        for hf, settings in clean:
            hf.generation_config = settings
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        finally:
            for (hf, _), settings in zip(clean, before, strict=True):
                hf.generation_config = settings


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed the global generators, the only ones that transformers uses; restore them at exit."""
    with torch.random.fork_rng():
        torch.default_generator.manual_seed(seed)
        torch.cuda.manual_seed_all(seed)
        yield


@contextmanager
def _counting() -> Iterator[list[tuple[int, int]]]:
    """Collect (drafted, accepted) token counts of each block while the context is open."""
    from transformers.generation.candidate_generator import AssistedCandidateGenerator

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
        accepted_by_position=tuple(sum(kept > i for _, kept in matches) for i in range(longest)),
    )
