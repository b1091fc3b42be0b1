"""Sampled text follows the distribution that its rule states, pair by pair of tokens.

Every test draws n texts from fixed seeds, long enough for a block that is accepted whole and its
bonus token, counts the pairs of tokens at neighbouring places and the first three tokens, and
compares them with an exact enumeration (`exact.py`) by one chi-square each. It fails where the
smallest of these 4 to 6 p-values is below 1e-4: odds of a false alarm at most 6 in 10,000 for a
test under other seeds, about 1 in 100 for the whole file. That these tests find what they are for,
`test_mutants.py` shows.
"""

from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest

from paceline.core.block import VerifiedRows, verify_block
from paceline.core.rules import Lenient, Lossless, Lossy, Rule
from paceline.decode import AutoregressiveDecoder, SpeculativeDecoder, block
from paceline.decode.text import Text
from paceline.models.contract import ModelSession
from support import exact
from support.fakes import TableModel
from support.rules import (
    ODDS,
    PROMPT,
    THRESHOLDS,
    Pair,
    draw,
    least_p_value,
    smallest_p_value,
    stating,
    table,
)

SHAPINGS = {
    "plain": exact.Shaping(),
    "cool": exact.Shaping(temperature=0.7),
    "top_k": exact.Shaping(top_k=3),
    "top_p": exact.Shaping(temperature=0.7, top_p=0.85),
    "penalty": exact.Shaping(repetition_penalty=1.5),
    "all": exact.Shaping(temperature=1.3, top_k=4, top_p=0.9, repetition_penalty=1.2),
}

RULES: list[tuple[Rule, exact.RuleVectors]] = [
    (Lenient("linear", 0.3), exact.lenient("linear", 0.3)),
    (Lenient("square", 0.6), exact.lenient("square", 0.6)),
    (Lenient("exponential", 0.3), exact.lenient("exponential", 0.3)),
    (Lossy(0.6), exact.lossy(0.6)),
    (Lossy(0.5, 1.6), exact.lossy(0.5, 1.6)),
    (Lossy(0.7, 0.4), exact.lossy(0.7, 0.4)),
]


def test_enumeration_agrees_with_itself_that_lossless_text_is_the_targets():
    pair = Pair(order=2, shaping=SHAPINGS["all"])
    for gamma in (1, 3):
        plain, speculative = pair.plain(gamma), pair.speculative(exact.lossless, gamma)
        assert max(abs(plain[text] - speculative[text]) for text in plain) < 1e-12


@pytest.mark.parametrize("shaping", ["plain", "all"])
def test_the_baseline_follows_the_target(shaping: str):
    """n = 3,000."""
    pair = Pair(order=2, shaping=SHAPINGS[shaping])
    texts = draw(AutoregressiveDecoder(pair.target, pair.sampling), 1, 3000)
    assert least_p_value(texts, pair.plain(1)) > ODDS


@pytest.mark.parametrize(
    ("shaping", "order", "gamma"),
    [
        ("plain", 1, 1),
        ("plain", 2, 4),
        ("cool", 1, 4),
        ("cool", 2, 1),
        ("top_k", 1, 4),
        ("top_k", 2, 1),
        ("top_p", 1, 1),
        ("top_p", 2, 4),
        ("penalty", 1, 4),
        ("penalty", 2, 1),
        ("all", 1, 1),
        ("all", 2, 4),
    ],
)
def test_lossless_speculation_follows_the_target(shaping: str, order: int, gamma: int):
    """n = 2,000."""
    pair = Pair(order, SHAPINGS[shaping])
    decoder = SpeculativeDecoder(
        pair.target, pair.draft, Lossless(), gamma=gamma, sampling=pair.sampling
    )
    assert least_p_value(draw(decoder, gamma, 2000), pair.plain(gamma)) > ODDS


@pytest.mark.parametrize("gamma", [1, 3])
@pytest.mark.parametrize(("rule", "vectors"), RULES, ids=[str(rule) for rule, _ in RULES])
def test_a_lossy_rule_follows_what_it_induces_and_its_bonus_tokens_the_target(
    rule: Rule, vectors: exact.RuleVectors, gamma: int
):
    """n = 2,000. The target's own distribution must fail on the same texts: the test has power."""
    pair = Pair(order=1)
    texts = draw(SpeculativeDecoder(pair.target, pair.draft, rule, gamma=gamma), gamma, 2000)
    assert least_p_value(texts, pair.speculative(vectors, gamma)) > ODDS
    assert smallest_p_value(texts, pair.plain(gamma)) < ODDS


@pytest.mark.parametrize("rule_number", [0, 4])
def test_a_lossy_rule_follows_what_it_induces_on_shaped_distributions(rule_number: int):
    """n = 2,000."""
    rule, vectors = RULES[rule_number]
    pair = Pair(order=2, shaping=SHAPINGS["all"])
    decoder = SpeculativeDecoder(pair.target, pair.draft, rule, gamma=3, sampling=pair.sampling)
    assert least_p_value(draw(decoder, 3, 2000), pair.speculative(vectors, 3)) > ODDS


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("gamma", [1, 4])
def test_long_texts_of_small_batches_follow_the_target_at_every_place(batch: int, gamma: int):
    """n = 900 transitions, one chi-square over all contexts; false alarm 1 in 10,000."""
    pair = Pair(order=1, shaping=SHAPINGS["cool"])
    decoder = SpeculativeDecoder(pair.target, pair.draft, gamma=gamma, sampling=pair.sampling)
    found = decoder.generate([PROMPT] * batch, 900 // batch, seed=20)
    texts = [generation.tokens for generation in found]
    assert exact.transitions_p_value(texts, pair.p, order=1) > ODDS
    assert exact.transitions_p_value(texts, pair.q, order=1) < ODDS


class DrawsANumberAgain(SpeculativeDecoder):
    """Beyond the draft's context every token of a text is drawn with one number."""

    def _verify(self, target: ModelSession, texts: Sequence[Text], *rest: Any) -> VerifiedRows:
        streams = [text._choosing for text in texts if not self._drafts(text)]
        numbers = [list(stream._drawn) for stream in streams]
        found = super()._verify(target, texts, *rest)
        for stream, drawn in zip(streams, numbers, strict=True):
            stream._drawn = drawn or stream._drawn
        return found


def of_border(kind: type[SpeculativeDecoder], rule: Rule, name: str, gamma: int) -> float:
    """The smallest p-value of all triples of a batch whose rows reach the border by turns.

    n = 1,200 texts of each of two prompts.
    """
    pair, prompts, room = Pair(order=1), (PROMPT, [0, *PROMPT]), len(PROMPT) + gamma + 2
    draft = TableModel(table(1, 2), max_length=room)
    decoder = kind(pair.target, draft, rule, gamma=gamma)
    length = gamma + 4
    found = decoder.generate([prompts[row % 2] for row in range(2400)], length, eos_token_ids=[])
    aim = exact.AIMS.get(name, lambda _: None)(THRESHOLDS.get(name, 0.0))

    def pi(text: tuple[int, ...]) -> exact.Distribution:
        assert aim is not None
        return aim(*pair.exact(text))

    def judged(text: tuple[int, ...]) -> tuple[exact.Distribution, exact.Distribution]:
        vectors = exact.lossy(0.6) if name == "lossy" else exact.lossless
        return vectors(pi(text) if aim else pair.p(text), pair.q(text))

    p_values: list[float] = []
    for row, prompt in enumerate(prompts):
        expected = exact.judged_texts(
            *(pair.p, pair.q, judged),
            gamma=gamma,
            prompt=tuple(prompt),
            length=length,
            bonus=pi if aim else None,
            room=room,
            first_from_target=rule.exact,
        )
        texts = [generation.tokens for generation in found[row::2]]
        p_values += exact.pair_p_values(texts, expected, width=3)
    return min(p_values)


BORDER_RULES = [(Lossless(), "lossless"), (Lossy(0.6), "lossy")]
BORDER_RULES += [(stating(name, THRESHOLDS[name]), name) for name in ("chow", "token_v3", "tuned")]
border = pytest.mark.parametrize(("rule", "name"), BORDER_RULES, ids=[n for _, n in BORDER_RULES])


@border
def test_beyond_the_drafts_context_every_token_follows_the_target(rule: Rule, name: str):
    """Also across the border; 8 to 10 p-values each."""
    assert of_border(SpeculativeDecoder, rule, name, 2) > ODDS
    assert of_border(DrawsANumberAgain, rule, name, 2) < ODDS


@pytest.mark.parametrize(("rule", "name"), BORDER_RULES[2:], ids=[n for _, n in BORDER_RULES[2:]])
def test_a_rule_that_reads_an_emptied_draft_beside_others_is_caught(rule: Rule, name: str):
    def mutant(logits: Any, drafted: Any, num_drafted: Any, *rest: Any) -> Any:
        return verify_block(logits, drafted, num_drafted.clamp(min=0), *rest)

    with patch.object(block, "verify_block", mutant):
        assert of_border(SpeculativeDecoder, rule, name, 2) < ODDS
