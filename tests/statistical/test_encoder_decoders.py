"""Texts of encoder-decoders follow their law at the borders of all decisions (`borders.py`).

Random models of five tokens and two sources, side by side in a batch; the distributions come from
plain passes of transformers.
"""

from functools import cache
from typing import Any
from unittest.mock import patch

import pytest

from paceline.core.rules import Lossless, Rule
from paceline.decode import SpeculativeDecoder
from paceline.models import HfModel, wrap_model
from paceline.models.hf.seq2seq import Seq2SeqCache
from support import exact
from support.borders import Law, num_wrong, walks
from support.laws import RULES, give_every_token_a_chance, next_token
from support.models import tiny_hf

SOURCES = ((3, 4, 3, 0, 1), (0,))
COUNT = 80


@cache
def models(architecture: str) -> tuple[HfModel, HfModel]:
    made: list[Any] = [tiny_hf(architecture, seed=seed, vocab_size=5).double() for seed in (0, 4)]
    for hf in made:
        give_every_token_a_chance(hf)
        if hasattr(hf, "final_logits_bias"):
            hf.final_logits_bias.zero_()
    target, draft = map(wrap_model, made)
    return target, draft


@cache
def both(architecture: str, source: tuple[int, ...]) -> exact.Models:
    """Of a text behind this source."""
    p, q = (next_token(model, source) for model in models(architecture))
    return exact.Models(p, q, p, q)


def wrong(architecture: str, rule: Rule, aim: exact.Aim | None) -> int:
    """Texts of the two sources alternate in a batch that is refilled."""
    vectors = exact.aimed_vectors(aim) if aim else exact.near(exact.lossless)
    laws = [
        Law(both(architecture, source), vectors, 2, 3, aim, first_from_target=aim is None)
        for source in SOURCES
    ]
    paths = [walks(law, [source], COUNT) for law, source in zip(laws, SOURCES, strict=True)]
    decoder = SpeculativeDecoder(*models(architecture), rule, gamma=2)
    return num_wrong(decoder, [one for two in zip(*paths, strict=True) for one in two], 50)


@pytest.mark.parametrize(
    ("architecture", "place"),
    [*(("t5_v1_1", place) for place in range(4)), ("t5", 0), ("t5", 1), ("bart", 0), ("bart", 2)],
)
def test_every_decision_of_a_text_is_the_rules(architecture: str, place: int):
    assert wrong(architecture, *RULES[place]) == 0


def test_another_rule_and_sources_that_change_rows_are_caught():
    assert wrong("t5_v1_1", Lossless(), RULES[1][1]) > 4
    keep = Seq2SeqCache.adopt

    def crossed(self: Seq2SeqCache, rows: list[int], other: Seq2SeqCache) -> None:
        keep(self, rows[::-1], other)

    with patch.object(Seq2SeqCache, "adopt", crossed):
        assert wrong("t5_v1_1", *RULES[0]) > 4
