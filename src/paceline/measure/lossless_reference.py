"""What `verify` compares with: the unprepared target, computed without Paceline's decoding.

A transformers model is asked by generate() and by a pass over the whole text without a cache. A
model of another kind, such as a table, has sessions only; its own decoder is the reference then.
"""

# T positions, V vocabulary
from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch

from paceline.data.collate import batches_of_like_length
from paceline.decode import AutoregressiveDecoder
from paceline.measure.acceptance import forced_logits, penalised_text
from paceline.models.contract import decoder_contexts
from paceline.models.hf.base import HfModel
from paceline.models.hf.plain_text import REFERENCE, greedy_texts, plain_text_logits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from paceline.core.sampling import SamplingParams
    from paceline.models.contract import Model

_BATCH_SIZE = 20


class Reference(ABC):
    """Greedy texts and logits of a target.

    Attributes:
        name: What computes them.
    """

    name: str

    @abstractmethod
    def greedy(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        sampling: SamplingParams,
        vocab_size: int,
    ) -> list[list[int]]:
        """The greedy text of each prompt; only the penalty of `sampling` is used."""

    @abstractmethod
    def logits(
        self,
        prompts: Sequence[Sequence[int]],
        texts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        vocab_size: int,
    ) -> list[Tensor]:
        """Logits before each token of each text, penalty applied, [T, V] each."""

    def gap(
        self,
        prompt: Sequence[int],
        tokens: Sequence[int],
        sampling: SamplingParams,
        vocab_size: int,
    ) -> float:
        """Difference of the two highest logits after these tokens."""
        # the logits are those before each token, so append an arbitrary one
        (logits_TV,) = self.logits([prompt], [[*tokens, 0]], sampling, vocab_size)
        best, second = logits_TV[-1].topk(2).values
        return float(best - second)


def reference_of(model: Model) -> Reference:
    """The most independent reference for this model."""
    return OfTransformers(model) if isinstance(model, HfModel) else OfSessions(model)


class OfTransformers(Reference):
    """generate(), and the pass of transformers over whole texts."""

    name = REFERENCE

    def __init__(self, model: HfModel) -> None:
        self._model = model

    def greedy(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        sampling: SamplingParams,
        vocab_size: int,
    ) -> list[list[int]]:
        rooms = [self._room(prompt, max_new_tokens) for prompt in prompts]
        whole = [row for row, room in enumerate(rooms) if room == max_new_tokens]
        lengths = [len(prompts[row]) for row in whole]
        groups = batches_of_like_length(lengths, _BATCH_SIZE) if whole else ()
        batches = [[whole[at] for at in group] for group in groups]
        batches += [[row] for row, room in enumerate(rooms) if room < max_new_tokens]
        found: dict[int, list[int]] = {}
        for rows in batches:
            texts = greedy_texts(
                self._model,
                [prompts[row] for row in rows],
                rooms[rows[0]],
                repetition_penalty=sampling.repetition_penalty,
                vocab_size=vocab_size,
                forces_eos=rooms[rows[0]] == max_new_tokens,  # not where the context ends
            )
            found |= zip(rows, texts, strict=True)
        return [found[row] for row in range(len(prompts))]

    def _room(self, prompt: Sequence[int], max_new_tokens: int) -> int:
        limit = self._model.max_length
        (context,) = decoder_contexts(self._model, [prompt])
        return max_new_tokens if limit is None else min(max_new_tokens, limit - len(context))

    def logits(
        self,
        prompts: Sequence[Sequence[int]],
        texts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        vocab_size: int,
    ) -> list[Tensor]:
        found = plain_text_logits(self._model, prompts, texts)
        return [
            penalised_text(self._model, prompt, text, logits_TV[:, :vocab_size], sampling)
            for prompt, text, logits_TV in zip(prompts, texts, found, strict=True)
        ]


class OfSessions(Reference):
    """The model's own sessions, for models that are not of transformers."""

    name = "the target's own sessions"

    def __init__(self, model: Model) -> None:
        self._model = model

    def greedy(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        sampling: SamplingParams,
        vocab_size: int,
    ) -> list[list[int]]:
        decoder = AutoregressiveDecoder(
            self._model, sampling.model_copy(update={"temperature": 0.0})
        )
        decoder.vocab_size = vocab_size
        texts = decoder.generate(prompts, max_new_tokens, batch_size=_BATCH_SIZE)
        return [text.tokens for text in texts]

    @torch.inference_mode()
    def logits(
        self,
        prompts: Sequence[Sequence[int]],
        texts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        vocab_size: int,
    ) -> list[Tensor]:
        return [
            forced_logits(self._model, prompt, text, sampling, vocab_size)
            for prompt, text in zip(prompts, texts, strict=True)
        ]
