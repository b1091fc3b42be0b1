"""Triples of tokens that encoder-decoders generate follow their exact distribution.

Random T5 models of five tokens and two sources, side by side in a batch; the distributions come
from plain passes of transformers, the texts from enumeration in Python floats. n texts of three
tokens, one chi-square over all 125 triples (cells expected below 5 are pooled), failure below 1e-4.
8 such tests: odds of a false alarm under other seeds at most 1.6 in 1,000 for the whole file. The
mutants at the end must fall below 1e-4 by the same procedure.
"""

from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch

from paceline.core.rules import BiLDRule, Chow, Lossless, Rule, TokenV3
from paceline.decode import SpeculativeDecoder
from paceline.models import HfModel, wrap_model
from paceline.models.hf.seq2seq import Seq2SeqCache
from paceline.rng import named_generator
from support import exact
from support.models import tiny_hf

ODDS = 1e-4
LENGTH = 3
SOURCES = ([3, 4, 3, 0, 1], [0])


@cache
def models(architecture: str) -> tuple[HfModel, HfModel]:
    """A random pair; heads of their own are made smaller, so that every token has its chance."""
    made = [tiny_hf(architecture, seed=seed, vocab_size=5) for seed in (0, 4)]
    for hf in made:
        head: Any = hf.get_output_embeddings()
        if head.weight is not hf.get_input_embeddings().weight:
            head.weight.data *= 0.35
        if hasattr(hf, "final_logits_bias"):
            hf.final_logits_bias.zero_()
    target, draft = map(wrap_model, made)
    return target, draft


def next_token(model: HfModel, source: list[int]) -> exact.NextToken:
    @cache
    def probs(text: tuple[int, ...]) -> exact.Distribution:
        batch = model.trial_batch(text, source=source)
        with torch.inference_mode():
            return model.plain_logits(batch)[0, -1].double().softmax(-1).tolist()

    return probs


@cache
def both(architecture: str, source: int) -> exact.Models:
    p, q = (next_token(model, SOURCES[source]) for model in models(architecture))
    return exact.Models(p, q, p, q)


def expected(architecture: str, source: int, aim: str, alpha: float) -> exact.Texts:
    if aim == "target":
        return exact.plain_texts(both(architecture, source).p, (), LENGTH)
    return exact.aimed_texts(both(architecture, source), exact.AIMS[aim](alpha), (), LENGTH)


def draw(decoder: SpeculativeDecoder, count: int) -> list[list[tuple[int, ...]]]:
    """Texts of each source; rows of the two alternate in the batch."""
    prompts = [SOURCES[row % 2] for row in range(2 * count)]
    found = decoder.generate(prompts, LENGTH, seed=0, eos_token_ids=[], batch_size=500)
    texts = [tuple(one.tokens) for one in found]
    return [texts[::2], texts[1::2]]


def p_value(texts: list[tuple[int, ...]], wanted: exact.Texts) -> float:
    num_cells = sum(share * len(texts) >= 5 for share in wanted.values())
    assert num_cells > 10, "a distribution that hardly varies tests nothing"
    return exact.chi_square_p_value(Counter(texts), wanted)


RULES: list[tuple[Rule, str, float]] = [
    (Lossless(), "target", 0.0),
    (Chow(0.5), "chow", 0.5),
    (TokenV3(0.5), "token_v3", 0.5),
    (BiLDRule(1.45), "bild", 1.45),
]


@pytest.mark.parametrize(
    ("architecture", "rule", "aim", "alpha"),
    [
        *(("t5_v1_1", *each) for each in RULES),
        *(("t5", *RULES[place]) for place in (0, 1)),
        *(("bart", *RULES[place]) for place in (0, 2)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_triples_follow_what_the_rule_aims_at(
    architecture: str, rule: Rule, aim: str, alpha: float
):
    """n = 1,500 texts for each source; the draft's own distribution must fail on the same texts."""
    texts = draw(SpeculativeDecoder(*models(architecture), rule, gamma=2), 1500)
    for source in (0, 1):
        assert p_value(texts[source], expected(architecture, source, aim, alpha)) > ODDS
        others = exact.plain_texts(both(architecture, source).q, (), LENGTH)
        assert p_value(texts[source], others) < ODDS


def caught(rule: Rule, aim: str, alpha: float, count: int = 800) -> bool:
    """True if the procedure rejects either source's texts."""
    texts = draw(SpeculativeDecoder(*models("t5_v1_1"), rule, gamma=2), count)
    return min(p_value(texts[s], expected("t5_v1_1", s, aim, alpha)) for s in (0, 1)) < ODDS


@pytest.mark.parametrize(("rule", "aim", "alpha"), RULES[:2], ids=["target", "chow"])
def test_one_random_stream_for_two_uses_is_caught(rule: Rule, aim: str, alpha: float):
    def mutant(seed: int, name: str) -> torch.Generator:
        return named_generator(seed, "shared")

    with patch("paceline.decode.text.named_generator", mutant):
        assert caught(rule, aim, alpha)


def crossed(keep: Callable[..., Any]) -> Callable[..., None]:
    def adopt(self: Seq2SeqCache, rows: list[int], other: Seq2SeqCache) -> None:
        keep(self, rows[::-1], other)

    return adopt


def test_sources_that_change_rows_are_caught():
    """A refill that gives rows each other's sources: the batch is refilled three times."""
    with patch.object(Seq2SeqCache, "adopt", crossed(Seq2SeqCache.adopt)):
        assert caught(Lossless(), "target", 0.0, 1000)


def test_a_source_read_as_the_beginning_of_the_text_is_caught():
    """The distributions of the other source, as if the encoder had not been asked."""
    texts = draw(SpeculativeDecoder(*models("t5_v1_1"), Lossless(), gamma=2), 800)
    assert p_value(texts[0], expected("t5_v1_1", 1, "target", 0.0)) < ODDS
