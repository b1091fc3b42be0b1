"""The first token follows the rule: the first three tokens of a text against their exact joint law.

A rule that changes the text judges the first token as any other, drafted by the draft behind the
prompt. n texts from fixed seeds; one chi-square over all triples of the first three tokens against
an enumeration in Python floats, and failure below 1e-4, which are the odds of a false alarm of each
test under other seeds; about 25 such tests. Those of `test_cascades.py` and `test_distributions.py`
look at these triples behind `PROMPT`, too. The mutant takes the first token from the target's pass
over the prompt, as lossless decoding does, and must be caught under every rule.
"""

from collections.abc import Callable, Sequence
from functools import cache
from itertools import cycle

import pytest

from paceline.core.rules import (
    Chow,
    Diff,
    Lenient,
    Lossless,
    Lossy,
    Opt,
    Rule,
    TokenV1,
    TokenV3,
)
from paceline.decode import (
    AutoregressiveDecoder,
    BigLittleDecoder,
    Confident,
    OracleCascade,
    SpeculativeDecoder,
    TokenCascade,
)
from paceline.decode.decoder import Decoder
from support import exact
from support.rules import ODDS, PROMPT, Pair, exact_models

AIMED: list[tuple[Rule, str, float]] = [
    (Chow(0.52), "chow", 0.52),
    (Opt(0.2), "opt", 0.2),
    (TokenV1(0.3), "token_v1", 0.3),
    (TokenV3(0.5), "token_v3", 0.5),
    (Diff(0.05), "diff", 0.05),
]
LOSSY: list[tuple[Rule, exact.RuleVectors]] = [
    (Lenient("linear", 0.3), exact.lenient("linear", 0.3)),
    (Lossy(0.5, 1.6), exact.lossy(0.5, 1.6)),
]
COOL = exact.Shaping(temperature=0.7)
GREEDY = exact.Shaping(temperature=0)
ALONE = [0]  # one token, so that sessions hold nothing when the first block begins
PROMPTS = [PROMPT, ALONE]
# Behind token 0 every rule's aim is far from the target.
FAR = [[3, 0], ALONE]
aimed = pytest.mark.parametrize(("rule", "name", "alpha"), AIMED, ids=[str(r) for r, *_ in AIMED])


def beginnings(
    decoder: Decoder, prompt: Sequence[int], count: int, length: int = 3
) -> list[list[int]]:
    found = decoder.generate([prompt] * count, length, seed=0)
    return [generation.tokens for generation in found]


@cache
def triples(
    name: str,
    alpha: float,
    prompt: tuple[int, ...],
    shaping: exact.Shaping,
    drafts: exact.Shaping | None = None,
) -> exact.Texts:
    return exact.aimed_texts(exact_models(shaping, drafts), exact.AIMS[name](alpha), prompt, 3)


@aimed
@pytest.mark.parametrize(
    ("shaping", "gamma"), [(exact.Shaping(), 1), (COOL, 4)], ids=["plain", "cool"]
)
def test_the_first_three_tokens_follow_the_aim(
    rule: Rule, name: str, alpha: float, shaping: exact.Shaping, gamma: int
):
    """n = 2,000 for each of 10 settings, behind a prompt of one token."""
    pair = Pair(1, shaping)
    decoder = SpeculativeDecoder(pair.target, pair.draft, rule, gamma, pair.sampling)
    texts = beginnings(decoder, ALONE, 2000)
    assert exact.beginning_p_value(texts, triples(name, alpha, tuple(ALONE), shaping), 3) > ODDS


@aimed
def test_so_they_do_with_greedy_drafts_and_blocks_that_end_when_unsure(
    rule: Rule, name: str, alpha: float
):
    """n = 2,000."""
    pair = Pair(1, exact.Shaping(), GREEDY)
    decoder = SpeculativeDecoder(
        *(pair.target, pair.draft, rule, 3, pair.sampling, Confident(0.4)),
        draft_sampling=pair.draft_sampling,
    )
    expected = triples(name, alpha, tuple(PROMPT), exact.Shaping(), GREEDY)
    assert exact.beginning_p_value(beginnings(decoder, PROMPT, 2000), expected, 3) > ODDS


@pytest.mark.parametrize(("rule", "vectors"), LOSSY, ids=[str(rule) for rule, _ in LOSSY])
@pytest.mark.parametrize(
    ("prompt", "length", "gamma"), [(ALONE, 3, 1), (ALONE, 3, 3), (ALONE, 1, 1), (PROMPT, 1, 3)]
)
def test_the_first_tokens_of_a_lossy_rule_are_drafted_and_judged(
    rule: Rule, vectors: exact.RuleVectors, gamma: int, prompt: list[int], length: int
):
    """n = 2,000. A text of one token is judged, too."""
    pair = Pair(1)
    decoder = SpeculativeDecoder(pair.target, pair.draft, rule, gamma)
    expected = exact.speculative_texts(
        pair.p, pair.q, vectors, gamma=gamma, prompt=tuple(prompt), length=length
    )
    texts = beginnings(decoder, prompt, 2000, length)
    assert exact.beginning_p_value(texts, expected, length) > ODDS
    plain = exact.plain_texts(pair.p, tuple(prompt), length)
    assert exact.beginning_p_value(texts, plain, length) < ODDS


@pytest.mark.parametrize("rollback", [None, 1.9])
def test_the_first_tokens_of_a_draft_that_writes_while_it_is_sure(rollback: float | None):
    """n = 2,000; TokenCascade without, BiLD with rollback."""
    pair = Pair(1, COOL)
    decoder: Decoder = (
        TokenCascade(pair.target, pair.draft, 0.6, pair.sampling, 3)
        if rollback is None
        else BigLittleDecoder(pair.target, pair.draft, 0.4, rollback, pair.sampling, 3)
    )
    expected = exact.block_texts(
        exact_models(COOL), tuple(ALONE), 3, sure=0.4, most=3, rollback=rollback
    )
    assert exact.beginning_p_value(beginnings(decoder, ALONE, 2000), expected, 3) > ODDS


def test_the_first_tokens_of_an_oracle_cascade():
    """n = 2,000."""
    pair = Pair(1, COOL)
    decoder = OracleCascade(pair.target, pair.draft, Diff(0.05), pair.sampling)
    expected = triples("diff", 0.05, tuple(ALONE), COOL)
    assert exact.beginning_p_value(beginnings(decoder, ALONE, 2000), expected, 3) > ODDS


@pytest.mark.parametrize("batch_size", [7, 200])
def test_first_tokens_follow_the_aim_where_texts_take_the_places_of_others(batch_size: int):
    """n = 1,500 for each of two prompts, mixed, so that rows of all lengths stand side by side."""
    pair = Pair(1)
    decoder = SpeculativeDecoder(pair.target, pair.draft, TokenV3(0.5), 2)
    mixed = [PROMPTS[row % 2] for row in range(3000)]
    found = decoder.generate(mixed, 4, seed=0, batch_size=batch_size)
    for number, prompt in enumerate(PROMPTS):
        texts = [generation.tokens for generation in found[number::2]]
        expected = triples("token_v3", 0.5, tuple(prompt), exact.Shaping())
        assert exact.beginning_p_value(texts, expected, 3) > ODDS


@pytest.mark.parametrize(
    "make",
    [
        lambda pair: SpeculativeDecoder(pair.target, pair.draft, Lossless(), 3),
        lambda pair: AutoregressiveDecoder(pair.target),
    ],
    ids=["lossless", "target alone"],
)
def test_what_loses_nothing_begins_as_the_target_does(make: Callable[[Pair], Decoder]):
    """n = 2,000."""
    pair = Pair(1)
    texts = beginnings(make(pair), ALONE, 2000)
    expected = exact.plain_texts(pair.p, tuple(ALONE), 3)
    assert exact.beginning_p_value(texts, expected, 3) > ODDS


class FirstFromTarget(SpeculativeDecoder):
    """Takes the first token from the target's pass over the prompt."""

    def __init__(self, *given: object, **named: object) -> None:
        super().__init__(*given, **named)  # pyright: ignore[reportArgumentType]
        self.verifies_first = False


@pytest.mark.parametrize(
    ("rule", "name", "alpha", "prompt"),
    [(*each, prompt) for each, prompt in zip(AIMED, cycle(FAR), strict=False)],
    ids=[str(rule) for rule, *_ in AIMED],
)
def test_a_first_token_of_the_targets_own_is_caught(
    rule: Rule, name: str, alpha: float, prompt: list[int]
):
    """n = 2,000."""
    pair = Pair(1)
    texts = beginnings(FirstFromTarget(pair.target, pair.draft, rule, 3), prompt, 2000)
    expected = triples(name, alpha, tuple(prompt), exact.Shaping())
    assert exact.beginning_p_value(texts, expected, 3) < ODDS
