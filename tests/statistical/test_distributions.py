"""Sampled text follows the distribution that its rule states, pair by pair of tokens.

Every test draws n texts from fixed seeds, long enough for a block that is accepted whole and its
bonus token, counts the pairs of tokens at neighbouring places and the first three tokens, and
compares them with an exact enumeration (`exact.py`) by one chi-square each. It fails where the
smallest of these 4 to 6 p-values is below 1e-4: odds of a false alarm at most 6 in 10,000 for a
test under other seeds, about 1 in 100 for the whole file. That these tests find what they are for,
`test_mutants.py` shows.
"""

import pytest

from paceline.core.rules import Lenient, Lossless, Lossy, Rule
from paceline.decode import AutoregressiveDecoder, SpeculativeDecoder
from support import exact
from support.rules import ODDS, PROMPT, Pair, draw, least_p_value, smallest_p_value

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
