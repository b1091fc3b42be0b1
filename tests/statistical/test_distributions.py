"""Sampled text follows the distribution that its rule states, pair by pair of tokens.

What `test_borders.py` shows decision by decision, given the numbers, here as a whole and without
assumptions on what numbers a block takes. Every test draws n texts from fixed seeds, counts the
pairs of tokens at neighbouring places, and compares them with an exact enumeration (`exact.py`) by
one chi-square each. It fails where the smallest of these 3 to 5 p-values is below 1e-4: odds of a
false alarm at most 5 in 10,000 for a test under other seeds. The mutants draw one number for two
uses, and must fail.
"""

from typing import Any
from unittest.mock import patch

import pytest
import torch

from paceline.core.rules import Lossless, Lossy
from paceline.decode import SpeculativeDecoder
from paceline.decode.ngram import NgramDraft
from paceline.rng import named_generator
from support import exact
from support.rules import ODDS, PROMPT, Pair, draw, length, smallest_p_value

ALL = exact.Shaping(temperature=1.3, top_k=4, top_p=0.9, repetition_penalty=1.2)


def test_text_of_a_parallel_draft_is_the_targets_by_enumeration():
    """q of a place is a marginal; a rule that judges it by another place loses the target."""
    pair = Pair(order=2, shaping=ALL)
    for gamma in (1, 2, 3):
        plain, found = pair.plain(gamma), pair.speculative(exact.lossless, gamma, mask=4)
        assert max(abs(plain[text] - found[text]) for text in plain) < 1e-12
    drawn_elsewhere = exact.judged_texts(
        *(pair.p, pair.q),
        lambda text, read: exact.lossless(pair.p(text), pair.q(read[:-1])),
        gamma=2,
        prompt=tuple(PROMPT),
        length=4,
        mask=4,
    )
    plain = pair.plain(2)
    assert max(abs(plain[text] - drawn_elsewhere[text]) for text in plain) > 1e-3


def test_sampled_text_of_a_parallel_draft_is_the_targets():
    """n = 2,000."""
    pair = Pair(2, exact.Shaping(temperature=1.3, top_k=4, top_p=0.9))
    pair.draft.mask_token = 4
    decoder = SpeculativeDecoder(pair.target, pair.draft, gamma=3, sampling=pair.sampling)
    assert smallest_p_value(draw(decoder, 3, 2000), pair.plain(3)) > ODDS


def test_sampled_text_of_lookups_is_the_targets():
    """n = 2,000."""
    pair = Pair(2, exact.Shaping(temperature=1.3, top_k=4, top_p=0.9))
    draft: Any = NgramDraft(pair.target)
    decoder = SpeculativeDecoder(pair.target, draft, gamma=3, sampling=pair.sampling)
    texts = decoder.generate([PROMPT] * 2000, length(3))
    assert smallest_p_value([text.tokens for text in texts], pair.plain(3)) > ODDS
    assert sum(text.stats.num_accepted for text in texts) > 500


def test_lossless_speculation_follows_the_target():
    """n = 2,000."""
    pair = Pair(2, ALL)
    decoder = SpeculativeDecoder(pair.target, pair.draft, gamma=4, sampling=pair.sampling)
    assert smallest_p_value(draw(decoder, 4, 2000), pair.plain(4)) > ODDS


def test_a_lossy_rule_follows_what_it_induces_and_its_bonus_tokens_the_target():
    """n = 2,000. The target's own distribution must fail on the same texts: the test has power."""
    pair = Pair(order=1)
    texts = draw(SpeculativeDecoder(pair.target, pair.draft, Lossy(0.5, 1.6), gamma=3), 3, 2000)
    assert smallest_p_value(texts, pair.speculative(exact.lossy(0.5, 1.6), 3)) > ODDS
    assert smallest_p_value(texts, pair.plain(3)) < ODDS


# vllm#47386: one random stream for drafting, accepting and recovering
@pytest.mark.parametrize("gamma", [1, 4])
@pytest.mark.parametrize(
    "shared",
    [
        {"draft", "accept", "choose"},
        {"draft", "accept"},
        {"accept", "choose"},
        {"draft", "choose"},
    ],
    ids=lambda names: "+".join(sorted(names)),
)
def test_one_random_stream_for_two_uses_is_caught(shared: set[str], gamma: int):
    """n = 1,000."""

    def mutant(seed: int, name: str) -> torch.Generator:
        return named_generator(seed, "shared" if name in shared else name)

    pair = Pair(order=1)
    with patch("paceline.decode.text.named_generator", mutant):
        texts = draw(SpeculativeDecoder(pair.target, pair.draft, Lossless(), gamma), gamma, 1000)
    assert smallest_p_value(texts, pair.plain(gamma)) < ODDS
