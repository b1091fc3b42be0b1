"""Text of the cascades that verify nothing follows its exact distribution, pair by pair of tokens.

As `test_distributions.py`: n texts from fixed seeds, one chi-square for each pair of neighbouring
places and one for the first three tokens, and failure where the smallest of these 4 to 6 p-values
is below 1e-4. 20 such tests: odds of a false alarm under other seeds at most 1 in 100 for the whole
file. That a test finds what it is for, the mutants at the end show. Cascades as rules of
speculative decoding: `test_borders.py`.
"""

from collections.abc import Callable
from typing import Any

import pytest

from paceline.decode import BigLittleDecoder, OracleCascade, SequenceCascade, TokenCascade
from paceline.decode.decoder import Decoder
from support import exact
from support.rules import (
    ODDS,
    PROMPT,
    THRESHOLDS,
    Pair,
    exact_models,
    least_p_value,
    length,
    smallest_p_value,
    stating,
)

PLAIN = exact.Shaping()
COOL = exact.Shaping(temperature=0.7)
ALONE = [0]  # one token, so that sessions hold nothing when the first block begins


def drawn(decoder: Decoder, prompt: list[int] = PROMPT, count: int = 2000) -> list[list[int]]:
    found = decoder.generate([prompt] * count, length(3), seed=0)
    return [generation.tokens for generation in found]


def while_sure(
    shaping: exact.Shaping, rollback: float | None, most: int, prompt: list[int] = PROMPT
) -> exact.Texts:
    models = exact_models(shaping)
    return exact.block_texts(
        models, tuple(prompt), length(3), sure=0.4, most=most, rollback=rollback
    )


@pytest.mark.parametrize(
    ("shaping", "most", "prompt"),
    [
        (PLAIN, 1, PROMPT),
        (PLAIN, 3, PROMPT),
        (COOL, 1, PROMPT),
        (COOL, 3, PROMPT),
        (COOL, 3, ALONE),
    ],
)
@pytest.mark.parametrize("rollback", [None, 1.9])
def test_a_draft_that_writes_while_it_is_sure(
    shaping: exact.Shaping, rollback: float | None, most: int, prompt: list[int]
):
    """n = 2,000; TokenCascade without, BiLD with rollback."""
    pair = Pair(order=1, shaping=shaping)
    decoder: Decoder = (
        TokenCascade(pair.target, pair.draft, 0.6, pair.sampling, most)
        if rollback is None
        else BigLittleDecoder(pair.target, pair.draft, 0.4, rollback, pair.sampling, most)
    )
    expected = while_sure(shaping, rollback, most, prompt)
    assert least_p_value(drawn(decoder, prompt), expected) > ODDS


ORACLES = ["bild", "chow", "chow_log", "diff", "diff_log", "opt", "opt_log"]


@pytest.mark.parametrize(
    ("name", "prompt"), [*((name, PROMPT) for name in ORACLES), ("diff", ALONE)]
)
def test_an_oracle_cascade_follows_the_rules_aim(name: str, prompt: list[int]):
    """n = 2,000."""
    alpha, pair = THRESHOLDS[name], Pair(order=1, shaping=COOL)
    decoder = OracleCascade(pair.target, pair.draft, stating(name, alpha), pair.sampling)  # pyright: ignore[reportArgumentType]
    aim = exact.AIMS[name](alpha)
    expected = exact.aimed_texts(exact_models(COOL), aim, tuple(prompt), length(3))
    assert least_p_value(drawn(decoder, prompt), expected) > ODDS


@pytest.mark.parametrize(("alpha", "normalise"), [(0.985, False), (0.65, True)])
def test_a_sequence_cascade_keeps_probable_responses_and_lets_the_target_answer_the_rest(
    alpha: float, *, normalise: bool
):
    """n = 2,000."""
    pair = Pair(order=1, shaping=COOL)
    decoder = SequenceCascade(pair.target, pair.draft, alpha, pair.sampling, normalise=normalise)
    expected = exact.sequence_texts(
        exact_models(COOL), tuple(PROMPT), length(3), alpha, normalise=normalise
    )
    texts = drawn(decoder)
    assert least_p_value(texts, expected) > ODDS
    assert smallest_p_value(texts, pair.plain(3)) < ODDS


@pytest.mark.parametrize(
    "make",
    [
        # asks the target one token late; keeps to the draft at a lower confidence; verifies nothing
        lambda pair: BigLittleDecoder(pair.target, pair.draft, 0.4, 1.9, pair.sampling, 4),
        lambda pair: BigLittleDecoder(pair.target, pair.draft, 0.3, 1.9, pair.sampling, 3),
        lambda pair: TokenCascade(pair.target, pair.draft, 0.6, pair.sampling, 3),
    ],
)
def test_a_broken_draft_that_writes_while_it_is_sure_is_caught(make: Callable[[Pair], Any]):
    texts = drawn(make(Pair(order=1)), count=4000)
    assert least_p_value(texts, while_sure(PLAIN, 1.9, 3)) < ODDS
