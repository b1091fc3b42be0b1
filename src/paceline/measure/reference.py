"""What `verify` compares with: greedy texts and logits of the unprepared target."""

# T positions, V vocabulary
from __future__ import annotations

import contextlib
import itertools
from typing import TYPE_CHECKING, Any

import torch

from paceline.data.collate import batches_of_like_length
from paceline.decode import AutoregressiveDecoder
from paceline.measure.acceptance import forced_logits, penalised_text
from paceline.models.contract import decoder_contexts
from paceline.models.hf.base import HfModel
from paceline.models.hf.plain_text import REFERENCE, greedy_texts, plain_text_logits
from paceline.progress import Progress, silent

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from torch import Tensor

    from paceline.core.sampling import SamplingParams
    from paceline.models.contract import Model

REFERENCE_TEXTS = "greedy texts of the target"
"""The part of `verify` that writes them, for its progress."""
_BATCH_SIZE = 20


def reference_name(model: Model) -> str:
    """What computes the expected texts and distributions of a target."""
    return REFERENCE if isinstance(model, HfModel) else "the target's own sessions"


def reference_greedy(
    model: Model,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: SamplingParams,
    vocab_size: int,
    progress: Progress = silent,
) -> list[list[int]]:
    """The greedy text of each prompt; only the penalty of `sampling` is used.

    A transformers model is asked by generate(), without Paceline's decoding. A model of another
    kind, such as a table, has sessions only; its own decoder is the reference then.
    """
    if isinstance(model, HfModel):
        return _greedy_of_transformers(
            model, prompts, max_new_tokens, sampling, vocab_size, progress
        )
    decoder = AutoregressiveDecoder(model, sampling.model_copy(update={"temperature": 0.0}))
    decoder.vocab_size = vocab_size
    texts = decoder.generate(prompts, max_new_tokens, batch_size=_BATCH_SIZE)
    return [text.tokens for text in texts]


@torch.inference_mode()
def reference_logits(
    model: Model,
    prompts: Sequence[Sequence[int]],
    texts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    vocab_size: int,
) -> list[Tensor]:
    """Logits before each token of each text, penalty applied, [T, V] each.

    Of a transformers model: by a pass over the whole text without a cache.
    """
    if not isinstance(model, HfModel):
        return [
            forced_logits(model, prompt, text, sampling, vocab_size)
            for prompt, text in zip(prompts, texts, strict=True)
        ]
    rows = zip(prompts, texts, plain_text_logits(model, prompts, texts), strict=True)
    return [
        penalised_text(model, prompt, text, logits_TV[:, :vocab_size], sampling)
        for prompt, text, logits_TV in rows
    ]


def logit_gap(
    model: Model,
    prompt: Sequence[int],
    tokens: Sequence[int],
    sampling: SamplingParams,
    vocab_size: int,
) -> float:
    """Difference of the reference's two highest logits after these tokens."""
    # the logits are those before each token, so append an arbitrary one
    (logits_TV,) = reference_logits(model, [prompt], [[*tokens, 0]], sampling, vocab_size)
    best, second = logits_TV[-1].topk(2).values
    return float(best - second)


def _greedy_of_transformers(
    model: HfModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: SamplingParams,
    vocab_size: int,
    progress: Progress,
) -> list[list[int]]:
    limit = model.max_length
    contexts = decoder_contexts(model, prompts)
    lengths = [
        max_new_tokens if limit is None else min(max_new_tokens, limit - len(context))
        for context in contexts
    ]
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

        with _each_pass(model.hf, passed):
            texts = greedy_texts(
                model,
                [prompts[row] for row in rows],
                length,
                repetition_penalty=sampling.repetition_penalty,
                vocab_size=vocab_size,
                forces_eos=length == max_new_tokens,  # not where the context ends
            )
        written |= zip(rows, texts, strict=True)
    return [written[row] for row in range(len(prompts))]


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
