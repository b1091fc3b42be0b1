"""What `verify` compares with: greedy texts and logits of the unprepared target."""

# T positions, V vocabulary
from __future__ import annotations

import contextlib
import itertools
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import torch

from paceline.data.collate import batches_of_like_length
from paceline.decode import AutoregressiveDecoder
from paceline.measure.acceptance import forced_logits, penalised_text
from paceline.models.contract import decoder_contexts
from paceline.models.hf.plain_text import REFERENCE, greedy_texts, plain_text_logits
from paceline.progress import Progress, silent

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from torch import Tensor

    from paceline.core.sampling import SamplingParams
    from paceline.models.contract import Model
    from paceline.models.hf.base import HfModel

REFERENCE_TEXTS = "greedy texts of the target"
"""The part of `verify` that writes them, for its progress."""
_BATCH_SIZE = 20


class Reference(ABC):
    """What `verify` compares with: greedy texts and logits of the unprepared target.

    A transformers model is asked by generate() and by a pass over the whole text without a cache,
    without Paceline's decoding. A model of another kind, such as a table, has sessions only; its
    own decoder is the reference then.

    Attributes:
        name: What computes them.
    """

    name: str

    @abstractmethod
    def greedy(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, progress: Progress = silent
    ) -> list[list[int]]:
        """The greedy text of each prompt; only the penalty of `sampling` is used."""

    @abstractmethod
    def logits(
        self, prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]
    ) -> list[Tensor]:
        """Logits before each token of each text, penalty applied, [T, V] each."""

    def gap(self, prompt: Sequence[int], tokens: Sequence[int]) -> float:
        """Difference of the two highest logits after these tokens."""
        # the logits are those before each token, so append an arbitrary one
        (logits_TV,) = self.logits([prompt], [[*tokens, 0]])
        best, second = logits_TV[-1].topk(2).values
        return float(best - second)


class OfTransformers(Reference):
    """generate(), and the pass of transformers over whole texts."""

    name = REFERENCE

    def __init__(self, model: HfModel, sampling: SamplingParams, vocab_size: int) -> None:
        self._model, self._sampling, self._vocab_size = model, sampling, vocab_size

    def greedy(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, progress: Progress = silent
    ) -> list[list[int]]:
        lengths = [self._length(prompt, max_new_tokens) for prompt in prompts]
        whole = [row for row, length in enumerate(lengths) if length == max_new_tokens]
        own_lengths = [len(prompts[row]) for row in whole]
        groups = batches_of_like_length(own_lengths, _BATCH_SIZE) if whole else ()
        batches = [[whole[at] for at in group] for group in groups]
        batches += [[row] for row, length in enumerate(lengths) if length < max_new_tokens]
        written: dict[int, list[int]] = {}
        for rows in batches:
            length, begun = lengths[rows[0]], len(written)

            def passed(number: int, part: float = len(rows) / length, begun: int = begun) -> None:
                progress(REFERENCE_TEXTS, begun + number * part, len(prompts))

            with _each_pass(self._model.hf, passed):
                texts = greedy_texts(
                    self._model,
                    [prompts[row] for row in rows],
                    length,
                    repetition_penalty=self._sampling.repetition_penalty,
                    vocab_size=self._vocab_size,
                    forces_eos=length == max_new_tokens,  # not where the context ends
                )
            written |= zip(rows, texts, strict=True)
        return [written[row] for row in range(len(prompts))]

    def _length(self, prompt: Sequence[int], max_new_tokens: int) -> int:
        """Maximum number of new tokens after this prompt."""
        limit = self._model.max_length
        (context,) = decoder_contexts(self._model, [prompt])
        return max_new_tokens if limit is None else min(max_new_tokens, limit - len(context))

    def logits(
        self, prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]
    ) -> list[Tensor]:
        rows = zip(prompts, texts, plain_text_logits(self._model, prompts, texts), strict=True)
        return [
            penalised_text(
                self._model, prompt, text, logits_TV[:, : self._vocab_size], self._sampling
            )
            for prompt, text, logits_TV in rows
        ]


@contextlib.contextmanager
def _each_pass(module: torch.nn.Module, passed: Callable[[int], None]) -> Generator[None]:
    """Call `passed` with the number of passes so far after each pass of a module."""
    numbers = itertools.count(1)

    def count(*_: Any) -> None:
        passed(next(numbers))

    handle = module.register_forward_hook(count)
    try:
        yield
    finally:
        handle.remove()


class OfSessions(Reference):
    """The model's own sessions, for models that are not of transformers."""

    name = "the target's own sessions"

    def __init__(self, model: Model, sampling: SamplingParams, vocab_size: int) -> None:
        self._model, self._sampling, self._vocab_size = model, sampling, vocab_size

    def greedy(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, progress: Progress = silent
    ) -> list[list[int]]:
        sampling = self._sampling.model_copy(update={"temperature": 0.0})
        decoder = AutoregressiveDecoder(self._model, sampling)
        decoder.vocab_size = self._vocab_size
        texts = decoder.generate(prompts, max_new_tokens, batch_size=_BATCH_SIZE)
        return [text.tokens for text in texts]

    @torch.inference_mode()
    def logits(
        self, prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]
    ) -> list[Tensor]:
        settings = self._sampling, self._vocab_size
        return [
            forced_logits(self._model, prompt, text, *settings)
            for prompt, text in zip(prompts, texts, strict=True)
        ]
