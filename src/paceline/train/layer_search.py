"""Searches for the target's layers with the highest acceptance as an untrained draft.

Small subsets of layers cannot be compared directly: without training, all have an acceptance near
0. The search therefore removes layers one by one, each time the one whose removal leaves the
highest acceptance. It then replaces single layers by adjacent ones while the acceptance rises.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import torch

from paceline.core.sampling import SamplingParams
from paceline.data.sources import rows_of, sample_completions
from paceline.errors import UsageError
from paceline.models.drafts.layers import layer_lists, subset_layers
from paceline.progress import silent
from paceline.rng import named_generator
from paceline.train.evaluation import AgreementEvaluator

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline.models.hf.base import HfModel
    from paceline.progress import Progress

_ROWS = 16  # texts that the target generates for evaluation
_PROMPT = 32  # prompt tokens per text
_NEW = 32  # generated tokens per text


class KeptLayers(NamedTuple):
    """Indices of the target's layers in a draft, in order; `encoder` None: all, or no encoder."""

    decoder: list[int]
    encoder: list[int] | None = None


def search_layers(
    target: HfModel,
    texts: Sequence[Sequence[int]],
    count: int | None,
    *,
    encoder_count: int | None = None,
    seed: int = 0,
    progress: Progress = silent,
) -> KeptLayers:
    """Find the `count` layers with the highest acceptance.

    The target generates evaluation text from the first tokens of `texts`. With `encoder_count`,
    layers of the encoder are searched next, for a draft with the layers found first.

    Args:
        target: The model.
        texts: Texts of a decoder-only model, or sources of an encoder-decoder.
        count: Layers, of the decoder if there is an encoder; None: all.
        encoder_count: Layers of the encoder; None: all.
        seed: Seed of the target's text.
        progress: Called with the progress of each search.

    Raises:
        UsageError: the target has fewer layers, or all texts are empty.
    """
    lists = layer_lists(target.hf)
    for part, wanted in (("decoder", count), ("encoder", encoder_count)):
        most = len(lists[part][1]) if part in lists else 0
        if wanted is not None and not 1 <= wanted <= most:
            of = "the target's layers" if len(lists) == 1 else f"the target's {part} layers"
            raise UsageError(f"got {wanted} layers to search for; wanted 1 to {most}, {of}")
    evaluator = _evaluator(target, texts, seed)
    decoder = tuple(range(len(lists["decoder"][1])))

    def acceptance(layers: tuple[int, ...], encoder: tuple[int, ...] | None) -> float:
        draft = subset_layers(target, layers, encoder, share=True)
        return evaluator.evaluate(draft)["expected_acceptance"]

    if count is not None:
        of_decoder = cache(lambda layers: acceptance(layers, None))
        decoder = _search(decoder, count, of_decoder, progress)
    if encoder_count is None:
        return KeptLayers(list(decoder))
    whole = tuple(range(len(lists["encoder"][1])))
    of_encoder = cache(lambda layers: acceptance(decoder, layers))
    return KeptLayers(list(decoder), list(_search(whole, encoder_count, of_encoder, progress)))


def _search(
    whole: tuple[int, ...],
    count: int,
    acceptance: Callable[[tuple[int, ...]], float],
    progress: Progress,
) -> tuple[int, ...]:
    chosen = whole
    while len(chosen) > count:
        chosen = max((_without(chosen, layer) for layer in chosen), key=acceptance)
        progress("searching layers", len(whole) - len(chosen), len(whole) - count)
    return climb(chosen, len(whole), acceptance)


def climb(
    chosen: tuple[int, ...], num_layers: int, acceptance: Callable[[tuple[int, ...]], float]
) -> tuple[int, ...]:
    """Replace one layer by an adjacent one while the acceptance rises."""
    while True:
        best = max([chosen, *_neighbours(chosen, num_layers)], key=acceptance)
        if best == chosen:
            return chosen
        chosen = best


def _neighbours(chosen: tuple[int, ...], num_layers: int) -> list[tuple[int, ...]]:
    moved = [
        (*_without(chosen, layer), layer + step)
        for layer in chosen
        for step in (-1, 1)
        if 0 <= layer + step < num_layers and layer + step not in chosen
    ]
    return [tuple(sorted(layers)) for layers in moved]


def _without(layers: tuple[int, ...], removed: int) -> tuple[int, ...]:
    return tuple(layer for layer in layers if layer != removed)


def _evaluator(target: HfModel, texts: Sequence[Sequence[int]], seed: int) -> AgreementEvaluator:
    longest = _PROMPT if target.decoder_prompt is None else None  # sources are kept whole
    prompts = [list(text[:longest]) for text in texts if len(text)][:_ROWS]
    if not prompts:
        raise UsageError("got no text to rank layers with; add documents")
    rng = named_generator(seed, "layer search")
    uniforms = torch.rand(len(prompts), _NEW, generator=rng, dtype=torch.float64)
    texts = sample_completions(target, prompts, uniforms)
    rows = rows_of(target, prompts, texts)
    return AgreementEvaluator(target, rows, SamplingParams(), gamma=1, vocab_size=target.vocab_size)
