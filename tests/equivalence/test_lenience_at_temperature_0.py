"""Lenience and lossy sampling at temperature 0 against a triple loop over transformers' own pass.

Blocks, drafted tokens and vocabulary in Python floats; every token costs one plain forward pass
over the whole text, without a cache. Our sessions: as transformers reads it, compiled, and those
that a GPU would record, with the rule in PyTorch as there.
"""

import functools
from collections.abc import Callable
from unittest.mock import Mock

import pytest
import torch
from transformers import PreTrainedModel

from paceline.core.rules import Lenient, Lossy, Rule
from paceline.core.sampling import SamplingParams
from paceline.decode import SpeculativeDecoder
from paceline.models import HfModel, prepare_for_decoding, wrap_model
from paceline.models.llama.cpu import NativeLlama
from paceline.models.prepare import with_cuda_graphs
from paceline.native import compiled
from paceline.native.kernels import NativeBackend
from support.models import tiny_hf
from support.rules import PYTORCH, using

GREEDY = SamplingParams(temperature=0)
PROMPTS = [[3, 4, 5], [7], [9, 8, 7, 6, 5, 4]]
NEW, GAMMA = 18, 3
RULES: list[tuple[Rule, Callable[[float, float], bool]]] = [
    (Lenient("linear", 0.2), lambda p, peak: p / 0.2 >= peak),
    (Lenient("exponential", 0.5), lambda p, peak: p**0.5 >= peak),
    (Lossy(0.8, 2.5), lambda p, peak: p / (1 - 0.8) >= peak),
]
PREPARED = {
    "plain": lambda model: model,
    "compiled": prepare_for_decoding,
    "recorded": with_cuda_graphs,
}


@functools.cache
def both() -> tuple[PreTrainedModel, PreTrainedModel]:
    """Logits as spread as those of a trained model; weights that the compiled pass knows."""
    models = [tiny_hf(seed=seed, initializer_range=0.25) for seed in (0, 1)]
    return tuple(model.bfloat16().float() for model in models)


@functools.cache
def prepared(kind: str) -> list[HfModel]:
    return [PREPARED[kind](wrap_model(model)) for model in both()]


@torch.no_grad()
def next_logits(model: PreTrainedModel, text: list[int]) -> list[float]:
    return model(torch.tensor([text])).logits[0, -1].double().tolist()


def best(values: list[float]) -> int:
    return values.index(max(values))


@functools.cache
def looped(prompt: tuple[int, ...], keeps: Callable[[float, float], bool]) -> tuple[list[int], int]:
    """The text, and how many of its tokens are not the target's most likely ones."""
    target, draft = both()
    text, num_changed = list(prompt), 0
    while len(text) < len(prompt) + NEW:
        drafted: list[int] = []
        for _ in range(GAMMA):
            drafted.append(best(next_logits(draft, text + drafted)))
        for place in range(GAMMA + 1):
            p = torch.tensor(next_logits(target, text)).softmax(-1).tolist()
            is_kept = place < GAMMA and keeps(p[drafted[place]], max(p))
            text.append(drafted[place] if is_kept else best(p))
            num_changed += text[-1] != best(p)
            if not is_kept:
                break
    return text[len(prompt) :][:NEW], num_changed


@pytest.mark.parametrize("kind", PREPARED)
@pytest.mark.parametrize(("rule", "keeps"), RULES, ids=[str(rule) for rule, _ in RULES])
def test_text_is_that_of_a_triple_loop(
    rule: Rule,
    keeps: Callable[[float, float], bool],
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
):
    in_c = Mock(wraps=NativeLlama.__call__)
    monkeypatch.setattr(NativeLlama, "__call__", lambda *given: in_c(*given))
    # filters have no effect at temperature 0
    sampling = GREEDY.model_copy(update={"top_k": 1, "top_p": 0.5}) if kind == "plain" else GREEDY
    decoder = SpeculativeDecoder(*prepared(kind), rule, GAMMA, sampling)
    # the last tokens of a text are in a shorter block
    with using(PYTORCH if kind == "recorded" else NativeBackend()):
        found = decoder.generate(PROMPTS, NEW + GAMMA, eos_token_ids=[])
        alone = [decoder.generate([one], NEW + GAMMA, eos_token_ids=[])[0] for one in PROMPTS]
    assert in_c.called == (kind == "compiled" and compiled() is not None)
    assert [one.tokens for one in found] == [one.tokens for one in alone]
    num_changed = 0
    for prompt, one in zip(PROMPTS, found, strict=True):
        text, changed = looped(tuple(prompt), keeps)
        assert one.tokens[:NEW] == text
        num_changed += changed
    assert num_changed > 3, "the rule changes nothing here"


@pytest.mark.parametrize("rule", [Lenient("linear", 1.0), Lossy(0.0), Lossy(0.0, "tuned")], ids=str)
def test_without_lenience_text_is_the_targets(rule: Rule):
    decoder = SpeculativeDecoder(*prepared("plain"), rule, GAMMA, GREEDY)
    found = decoder.generate(PROMPTS, NEW, eos_token_ids=[])
    texts = [looped(tuple(prompt), float.__eq__)[0] for prompt in PROMPTS]
    assert [one.tokens for one in found] == texts
