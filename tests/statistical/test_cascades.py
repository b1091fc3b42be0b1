"""Text of every cascade follows its exact distribution, pair by pair of tokens.

As `test_distributions.py`: n texts from fixed seeds, one chi-square for each pair of neighbouring
places and one for the first three tokens, and failure where the smallest of these 4 to 6 p-values
is below 1e-4. 51 such tests: odds of a false alarm under other seeds at most 3 in 100 for the whole
file. At temperature 0 there is one text, and it is compared token by token. That a test finds what
it is for, the mutants at the end show.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.core.backend import using
from paceline.core.rule_base import Position
from paceline.core.rules import BiLDRule, Chow, Lossless, Lossy, Opt, Rule, TokenV2
from paceline.decode import (
    Adaptive,
    BigLittleDecoder,
    Confident,
    OracleCascade,
    SequenceCascade,
    SpeculativeDecoder,
    TokenCascade,
)
from paceline.decode.decoder import Decoder
from paceline.decode.draft_policies import AnyPolicy
from support import exact
from support.rules import (
    ODDS,
    PROMPT,
    PYTORCH,
    THRESHOLDS,
    VOCABULARY,
    Pair,
    draw,
    exact_models,
    least_p_value,
    length,
    smallest_p_value,
    stating,
)

RULES = [(stating(name, alpha), name, alpha) for name, alpha in THRESHOLDS.items()]
COOL = exact.Shaping(temperature=0.7)
GREEDY = exact.Shaping(temperature=0)
ALL = exact.Shaping(temperature=1.3, top_k=4, top_p=0.9, repetition_penalty=1.2)
rules = pytest.mark.parametrize(("rule", "name", "alpha"), RULES, ids=[str(r) for r, *_ in RULES])


def p_value(decoder: Decoder, gamma: int, expected: exact.Texts, count: int = 2000) -> float:
    return least_p_value(draw(decoder, gamma, count), expected)


@cache
def alone(model: str, shaping: exact.Shaping, gamma: int) -> exact.Texts:
    """Texts of one model."""
    return exact.aimed_texts(
        exact_models(shaping),
        lambda p, q, *_: p if model == "target" else q,
        tuple(PROMPT),
        length(gamma),
    )


def aimed(name: str, alpha: float, shaping: exact.Shaping, gamma: int) -> exact.Texts:
    aim = exact.AIMS[name](alpha)
    return exact.aimed_texts(exact_models(shaping), aim, tuple(PROMPT), length(gamma))


@rules
@pytest.mark.parametrize(
    ("shaping", "gamma"), [(exact.Shaping(), 1), (COOL, 4)], ids=["plain", "cool"]
)
def test_a_rule_with_an_aim_follows_it_bonus_tokens_too(
    rule: Rule, name: str, alpha: float, shaping: exact.Shaping, gamma: int
):
    """n = 2,000. The target's and the draft's own distributions must fail on the same texts."""
    pair = Pair(order=1, shaping=shaping)
    decoder = SpeculativeDecoder(pair.target, pair.draft, rule, gamma, pair.sampling)
    texts = draw(decoder, gamma, 2000)
    assert least_p_value(texts, aimed(name, alpha, shaping, gamma)) > ODDS
    for model in ("target", "draft"):
        assert smallest_p_value(texts, alone(model, shaping, gamma)) < ODDS


@pytest.mark.parametrize("number", [1, 8, 10])
def test_a_rule_with_an_aim_follows_it_through_torch(number: int):
    """n = 2,000, without the C library."""
    rule, name, alpha = RULES[number]
    pair = Pair(order=1, shaping=COOL)
    decoder = SpeculativeDecoder(pair.target, pair.draft, rule, 3, pair.sampling)
    with using(PYTORCH):
        assert p_value(decoder, 3, aimed(name, alpha, COOL, 3)) > ODDS


@pytest.mark.parametrize("number", [1, 5, 9])
def test_a_rule_with_an_aim_follows_it_on_shaped_distributions(number: int):
    """n = 2,000. Confidences are those of the penalised, untempered, uncut distributions."""
    rule, name, alpha = RULES[number]
    pair = Pair(order=1, shaping=ALL)
    decoder = SpeculativeDecoder(pair.target, pair.draft, rule, 3, pair.sampling)
    assert p_value(decoder, 3, aimed(name, alpha, ALL, 3)) > ODDS


@rules
@pytest.mark.parametrize("gamma", [1, 4])
def test_at_temperature_0_a_rule_takes_the_best_token_of_one_model(
    rule: Rule, name: str, alpha: float, gamma: int
):
    pair = Pair(order=1, shaping=GREEDY)
    decoder = SpeculativeDecoder(pair.target, pair.draft, rule, gamma, pair.sampling)
    greedy, aim = exact_models(GREEDY), exact.AIMS[name](alpha)
    for prompt in range(VOCABULARY):
        (found,) = decoder.generate([[prompt]], 12, eos_token_ids=[])
        text: tuple[int, ...] = ()
        for _ in range(12):
            pi = aim(*greedy((prompt, *text)))
            text += (pi.index(max(pi)),)
        assert tuple(found.tokens) == text


@pytest.mark.parametrize("number", [1, 8, 10])
def test_a_text_does_not_depend_on_its_company(number: int):
    """Batch 3 gives what batch 1 gives, so that what holds for one holds for the other."""
    rule, *_ = RULES[number]
    pair = Pair(order=1, shaping=COOL)
    decoder = SpeculativeDecoder(pair.target, pair.draft, rule, 4, pair.sampling)
    prompts = [[3, 1], [0], [2, 2, 4]]
    together = decoder.generate(prompts, 25, seed=[5, 6, 7])
    alone = [
        decoder.generate([prompt], 25, seed)[0]
        for prompt, seed in zip(prompts, [5, 6, 7], strict=True)
    ]
    assert together == alone


POLICIES: list[AnyPolicy] = [Confident(0.4), Adaptive(0.2, prior=0.5, prior_tokens=2)]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize(
    ("rule", "name", "alpha"), [(Lossless(), None, 0.0), RULES[1], RULES[8]], ids=str
)
def test_a_policy_changes_the_length_of_blocks_and_not_the_text(
    policy: AnyPolicy, rule: Rule, name: str | None, alpha: float
):
    """n = 2,000."""
    pair = Pair(order=1, shaping=COOL)
    decoder = SpeculativeDecoder(pair.target, pair.draft, rule, 4, pair.sampling, policy)
    expected = pair.plain(4) if name is None else aimed(name, alpha, COOL, 4)
    found = decoder.generate([PROMPT] * 2000, length(4))
    assert least_p_value([one.tokens for one in found], expected) > ODDS
    blocks = [block for seed in range(20) for block in decoder.stream(PROMPT, 20, seed)]
    assert len({block.num_drafted for block in blocks}) > 2


@pytest.mark.parametrize("shaping", [exact.Shaping(), COOL], ids=["plain", "cool"])
@pytest.mark.parametrize("rollback", [None, 1.9])
@pytest.mark.parametrize("most", [1, 3])
def test_a_draft_that_writes_while_it_is_sure(
    shaping: exact.Shaping, rollback: float | None, most: int
):
    """n = 2,000; TokenCascade without, BiLD with rollback."""
    pair = Pair(order=1, shaping=shaping)
    decoder: Decoder = (
        TokenCascade(pair.target, pair.draft, 0.6, pair.sampling, most)
        if rollback is None
        else BigLittleDecoder(pair.target, pair.draft, 0.4, rollback, pair.sampling, most)
    )
    expected = exact.block_texts(
        exact_models(shaping), tuple(PROMPT), length(3), sure=0.4, most=most, rollback=rollback
    )
    assert p_value(decoder, 3, expected) > ODDS


@pytest.mark.parametrize("number", range(7))
def test_an_oracle_cascade_follows_the_rules_aim(number: int):
    """n = 2,000."""
    rule, name, alpha = RULES[number]
    pair = Pair(order=1, shaping=COOL)
    decoder = OracleCascade(pair.target, pair.draft, rule, pair.sampling)  # pyright: ignore[reportArgumentType]
    assert p_value(decoder, 3, aimed(name, alpha, COOL, 3)) > ODDS


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
    texts = draw(decoder, 3, 2000)
    assert least_p_value(texts, expected) > ODDS
    assert smallest_p_value(texts, pair.plain(3)) < ODDS


class BonusFromTarget(Chow):
    """Takes the bonus from p, as a lossless rule does."""

    def pi_at(self, at: Position) -> Tensor:
        aim = super().pi_at(at)
        return torch.cat([aim[:, :-1], at.target[:, -1:]], 1)


class TemperedConfidence(Chow):
    def defers(self, at: Position) -> Tensor:
        return super().defers(Position.of(at.target, at.draft))


class ForgetsWhatWasGivenUp(TokenV2):
    """Renormalises what is left of q, where eta p belongs."""

    def pi_at(self, at: Position) -> Tensor:
        lost = self.defers(Position.of(at.target, at.draft))
        left = at.draft.masked_fill(lost, 0)
        return left / left.sum(-1, keepdim=True).clamp(min=1e-9)


class SurpriseOfTheDraft(BiLDRule):
    """D the other way round."""

    def defers(self, at: Position) -> Tensor:
        return super().defers(Position(at.draft, at.target, at.draft_raw, at.target_raw))


class WeighsWithTwiceTheDistance(Opt):
    """The L1 norm, where its half belongs."""

    def defers(self, at: Position) -> Tensor:
        return Opt(2 * self.alpha).defers(at)


class UntunedAim(Lossy):
    """The paper's aim with beta 1, normalised: not what the procedure makes."""

    def pi_at(self, at: Position) -> Tensor:
        kept = torch.minimum(at.draft, at.target / (1 - self.alpha))
        aim = torch.maximum(kept, at.target)
        return aim / aim.sum(-1, keepdim=True)


@pytest.mark.parametrize(
    ("mutant", "name", "alpha", "shaping"),
    [
        (BonusFromTarget(0.52), "chow", 0.52, exact.Shaping()),
        (TemperedConfidence(0.52), "chow", 0.52, COOL),
        (ForgetsWhatWasGivenUp(0.3), "token_v2", 0.3, exact.Shaping()),
        (SurpriseOfTheDraft(1.9), "bild", 1.9, exact.Shaping()),
        (WeighsWithTwiceTheDistance(0.2), "opt", 0.2, exact.Shaping()),
        (UntunedAim(0.7, "tuned"), "tuned", 0.7, exact.Shaping()),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Rule) else "",
)
def test_a_broken_cascade_is_caught(mutant: Rule, name: str, alpha: float, shaping: exact.Shaping):
    pair = Pair(order=1, shaping=shaping)
    decoder = SpeculativeDecoder(pair.target, pair.draft, mutant, 1, pair.sampling)
    assert p_value(decoder, 1, aimed(name, alpha, shaping, 1), 3000) < ODDS


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
    pair = Pair(order=1)
    expected = exact.block_texts(
        exact_models(exact.Shaping()), tuple(PROMPT), length(3), sure=0.4, most=3, rollback=1.9
    )
    assert p_value(make(pair), 3, expected, 4000) < ODDS
