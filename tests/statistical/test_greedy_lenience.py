"""Text of lenience and lossy sampling at temperature 0, against enumerations in Python floats.

Where the draft samples: n = 2,000 texts from fixed seeds and one chi-square for each pair of
neighbouring places, as in `test_distributions.py`, and one for the first three tokens; failure
below 1e-4, which are the odds of a false alarm of each p-value under other seeds. Mutants fail.
Where the draft is greedy, too: `equivalence/test_lenience_at_temperature_0.py`.
"""

import pytest
import torch
from torch import Tensor

from paceline.core.rule_base import Position
from paceline.core.rules import Lenient, Lossy, Rule
from paceline.decode import SpeculativeDecoder
from support import exact
from support.rules import ODDS, PROMPT, Pair, draw, least_p_value, smallest_p_value

GREEDY = exact.Shaping(temperature=0)
PENALTY = exact.Shaping(temperature=0, repetition_penalty=1.5)
# filters that would leave the most likely token alone; they have no effect at temperature 0
FILTERED = exact.Shaping(temperature=0, top_k=1, top_p=0.1)
PLAIN = exact.Shaping()
RULES: list[tuple[Rule, exact.RuleVectors]] = [
    (Lenient("linear", 0.3), exact.lenient_at_0("linear", 0.3)),
    (Lenient("square", 0.5), exact.lenient_at_0("square", 0.5)),
    (Lenient("exponential", 0.4), exact.lenient_at_0("exponential", 0.4)),
    (Lossy(0.6), exact.lossy_at_0(0.6)),
    (Lossy(0.8, 1.6), exact.lossy_at_0(0.8)),
]
rules = pytest.mark.parametrize(("rule", "vectors"), RULES, ids=[str(rule) for rule, _ in RULES])


def texts_of(rule: Rule, pair: Pair, gamma: int) -> list[list[int]]:
    models = pair.target, pair.draft, rule, gamma, pair.sampling
    return draw(SpeculativeDecoder(*models, draft_sampling=pair.draft_sampling), gamma, 2000)


@rules
@pytest.mark.parametrize(
    ("shaping", "gamma"),
    [(GREEDY, 1), (PENALTY, 3), (FILTERED, 3)],
    ids=["plain", "penalty", "few"],
)
def test_text_of_a_draft_that_samples_follows_the_rule(
    rule: Rule, vectors: exact.RuleVectors, shaping: exact.Shaping, gamma: int
):
    """n = 2,000. Lossless text must fail."""
    pair = Pair(1, shaping, PLAIN)
    texts = texts_of(rule, pair, gamma)
    assert least_p_value(texts, pair.speculative(vectors, gamma)) > ODDS
    assert smallest_p_value(texts, pair.plain(gamma)) < ODDS


@pytest.mark.parametrize("shaping", [GREEDY, PENALTY], ids=["plain", "penalty"])
def test_under_the_tuned_rule_bonus_tokens_follow_it_too(shaping: exact.Shaping):
    """n = 2,000."""
    pair = Pair(1, shaping, PLAIN)
    aim = exact.tuned_lossy(0.6)
    for gamma in (1, 3):
        texts = texts_of(Lossy(0.6, "tuned"), pair, gamma)
        expected = exact.aimed_texts(pair.exact, aim, tuple(PROMPT), len(texts[0]))
        assert least_p_value(texts, expected) > ODDS
        assert smallest_p_value(texts, pair.plain(gamma)) < ODDS


class ComparesOneHot(Lenient):
    """The fault that this page is about: p at temperature 0 in place of p untempered."""

    def accept_at(self, at: Position) -> Tensor:
        return super().accept_at(Position.of(at.target, at.draft))


class ComparesWithTheDraft(Lenient):
    """f(p_raw) against max q."""

    def accept_at(self, at: Position) -> Tensor:
        return (self.relaxed(at.target_raw) >= at.draft.amax(-1, keepdim=True)).float()


class LeavesOutLenience(Lenient):
    """p_raw against its maximum: only ties are kept."""

    def accept_at(self, at: Position) -> Tensor:
        return (at.target_raw >= at.target_raw.amax(-1, keepdim=True)).float()


class KeepsWithProbability(Lenient):
    """min(1, f(p_raw) / max p_raw): a coin, where there is none."""

    def accept_at(self, at: Position) -> Tensor:
        peak = at.target_raw.amax(-1, keepdim=True)
        return (self.relaxed(at.target_raw) / peak).clamp(max=1)


class RecoversBySampling(Lenient):
    def residual_at(self, at: Position) -> Tensor:
        return at.target_raw


@pytest.mark.parametrize(
    "mutant",
    [
        ComparesOneHot,
        ComparesWithTheDraft,
        LeavesOutLenience,
        KeepsWithProbability,
        RecoversBySampling,
    ],
)
def test_a_broken_rule_is_caught(mutant: type[Lenient]):
    pair = Pair(1, GREEDY, PLAIN)
    texts = texts_of(mutant("linear", 0.3), pair, 3)
    assert smallest_p_value(texts, pair.speculative(RULES[0][1], 3)) < ODDS


def test_another_rule_or_another_epsilon_is_caught():
    pair = Pair(1, GREEDY, PLAIN)
    for wrong in (Lenient("square", 0.3), Lenient("linear", 0.9), Lossy(0.3)):
        texts = texts_of(wrong, pair, 3)
        assert smallest_p_value(texts, pair.speculative(RULES[0][1], 3)) < ODDS


def test_untempered_probabilities_are_those_before_filters(monkeypatch: pytest.MonkeyPatch):
    """Of a rule that depends on the sum: exponential lenience on the two best tokens alone."""

    def cut(self: Lenient, at: Position) -> Tensor:
        best = at.target_raw.topk(2).indices
        raw = torch.zeros_like(at.target_raw).scatter(-1, best, at.target_raw.gather(-1, best))
        raw = raw / raw.sum(-1, keepdim=True)
        return (self.relaxed(raw) >= raw.amax(-1, keepdim=True)).float()

    rule, vectors = RULES[2]
    pair = Pair(1, exact.Shaping(temperature=0, top_k=2), PLAIN)
    assert smallest_p_value(texts_of(rule, pair, 3), pair.speculative(vectors, 3)) > ODDS
    mutant = type("Cut", (Lenient,), {"accept_at": cut})("exponential", 0.4)
    assert smallest_p_value(texts_of(mutant, pair, 3), pair.speculative(vectors, 3)) < ODDS
