"""Searches for the target's layers with the highest acceptance as an untrained draft.

Small subsets of layers cannot be compared directly: without training, all have an acceptance near
0. The search therefore removes layers one by one, each time the one whose removal leaves the
highest acceptance. It then replaces single layers by adjacent ones while the acceptance rises.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from paceline.core.sampling import SamplingParams
from paceline.data.collate import Row
from paceline.data.completions import sample_completions
from paceline.errors import UsageError
from paceline.models.drafts.layers import layer_list, subset_layers
from paceline.progress import silent
from paceline.rng import named_generator
from paceline.train.evaluation import AgreementEvaluator

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline.models.hf.causal import CausalModel
    from paceline.progress import Progress

_ROWS = 16  # texts that the target generates for evaluation
_PROMPT = 32  # prompt tokens per text
_NEW = 32  # generated tokens per text


def search_layers(
    target: CausalModel,
    texts: Sequence[Sequence[int]],
    count: int,
    *,
    seed: int = 0,
    progress: Progress = silent,
) -> list[int]:
    """Find the `count` layers with the highest acceptance. -> their indices, in order.

    The target generates evaluation text from the first tokens of `texts`.

    Raises:
        UsageError: the target has fewer layers, or all texts are empty.
    """
    _, layers = layer_list(target.hf)
    if not 1 <= count <= len(layers):
        raise UsageError(
            f"got {count} layers to search for; wanted 1 to {len(layers)}, the target's layers"
        )
    evaluator = _evaluator(target, texts, seed)
    known: dict[tuple[int, ...], float] = {}

    def acceptance(chosen: tuple[int, ...]) -> float:
        if chosen not in known:
            draft = subset_layers(target, chosen, share=True)
            known[chosen] = evaluator.evaluate(draft)["expected_acceptance"]
        return known[chosen]

    chosen = tuple(range(len(layers)))
    while len(chosen) > count:
        chosen = max((_without(chosen, layer) for layer in chosen), key=acceptance)
        progress("searching layers", len(layers) - len(chosen), len(layers) - count)
    return list(climb(chosen, len(layers), acceptance))


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


def _evaluator(
    target: CausalModel, texts: Sequence[Sequence[int]], seed: int
) -> AgreementEvaluator:
    prompts = [list(text[:_PROMPT]) for text in texts if len(text)][:_ROWS]
    if not prompts:
        raise UsageError("got no text to rank layers with; add documents")
    rng = named_generator(seed, "layer search")
    uniforms = torch.rand(len(prompts), _NEW, generator=rng, dtype=torch.float64)
    texts = sample_completions(target, prompts, uniforms)
    rows = [Row([*prompt, *text], len(prompt)) for prompt, text in zip(prompts, texts, strict=True)]
    return AgreementEvaluator(target, rows, SamplingParams(), gamma=1, vocab_size=target.vocab_size)
