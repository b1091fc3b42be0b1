"""A draft that draws at settings of its own: the text still follows what the rule states.

As `test_distributions.py`: n texts from fixed seeds, one chi-square for each pair of neighbouring
places against an enumeration in Python floats, and failure where the smallest of these 3 to 5
p-values is below 1e-4: odds of a false alarm at most 5 in 10,000 for a test under other seeds,
about 1 in 50 for the whole file. q is what the draft really proposes: one-hot where it is greedy.
The mutants at the end show that these tests find a q that is not the proposal.
"""

from collections.abc import Sequence
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from paceline.core import block
from paceline.core.block import Drafted, VerifiedRows
from paceline.core.rule_base import Position
from paceline.core.rules import (
    BiLDRule,
    Chow,
    Lenient,
    Lossless,
    Lossy,
    Opt,
    Rule,
    TokenV1,
    TokenV3,
)
from paceline.core.sampling import SamplingParams, to_probs
from paceline.decode import Confident, SpeculativeDecoder
from paceline.decode.text import Text
from paceline.models.contract import ModelSession
from support import exact
from support.rules import ODDS, PROMPT, Pair, draw, length, smallest_p_value

PLAIN = exact.Shaping()
COOL = exact.Shaping(temperature=0.7)
GREEDY = exact.Shaping(temperature=0)
ALL = exact.Shaping(temperature=1.3, top_k=4, top_p=0.9, repetition_penalty=1.2)

# how the target samples, how the draft draws
SETTINGS = {
    "greedy at 1": (PLAIN, GREEDY),
    "greedy at 0.7": (COOL, GREEDY),
    "cold": (PLAIN, exact.Shaping(temperature=0.3)),
    "hot": (COOL, exact.Shaping(temperature=1.5)),
    "few": (PLAIN, exact.Shaping(top_k=2)),
    "nucleus": (COOL, exact.Shaping(temperature=1.2, top_p=0.6)),
    "whole under top-k": (exact.Shaping(top_k=3), PLAIN),
    "greedy under a penalty": (exact.Shaping(repetition_penalty=1.5), GREEDY),
    "all": (ALL, exact.Shaping(temperature=0.6, top_p=0.8)),
}


def decoder(
    pair: Pair, rule: Rule, gamma: int, kind: type[SpeculativeDecoder] = SpeculativeDecoder
) -> SpeculativeDecoder:
    return kind(
        *(pair.target, pair.draft, rule, gamma, pair.sampling),
        draft_sampling=pair.draft_sampling,
    )


@pytest.mark.parametrize(
    ("setting", "gamma"),
    [*((each, 4) for each in SETTINGS), *((each, 1) for each in ("greedy at 1", "cold", "few"))],
)
def test_lossless_text_follows_the_target_however_the_draft_draws(setting: str, gamma: int):
    """n = 2,000."""
    pair = Pair(2 if gamma == 1 else 1, *SETTINGS[setting])
    texts = draw(decoder(pair, Lossless(), gamma), gamma, 2000)
    assert smallest_p_value(texts, pair.plain(gamma)) > ODDS


@pytest.mark.parametrize("setting", ["greedy at 1", "cold", "nucleus"])
def test_so_it_does_where_blocks_end_before_an_unsure_draft(setting: str):
    """n = 2,000. Confidence is the untempered draft's, whatever it draws with."""
    pair = Pair(1, *SETTINGS[setting])
    made = SpeculativeDecoder(
        *(pair.target, pair.draft, Lossless(), 4, pair.sampling, Confident(0.4)),
        draft_sampling=pair.draft_sampling,
    )
    assert smallest_p_value(draw(made, 4, 2000), pair.plain(4)) > ODDS


@pytest.mark.parametrize("setting", ["greedy at 1", "hot", "all"])
@pytest.mark.parametrize(
    ("rule", "vectors"),
    [(Lenient("linear", 0.3), exact.lenient("linear", 0.3)), (Lossy(0.5), exact.lossy(0.5))],
    ids=["lenient", "lossy"],
)
def test_a_lossy_rule_follows_what_it_induces_from_the_proposal(
    setting: str, rule: Rule, vectors: exact.RuleVectors
):
    """n = 2,000."""
    pair = Pair(1, *SETTINGS[setting])
    texts = draw(decoder(pair, rule, 3), 3, 2000)
    assert smallest_p_value(texts, pair.speculative(vectors, 3)) > ODDS


AIMED: list[tuple[Rule, str, float]] = [
    (Chow(0.52), "chow", 0.52),
    (Opt(0.2), "opt", 0.2),
    (BiLDRule(1.9), "bild", 1.9),
    (TokenV1(0.3), "token_v1", 0.3),
    (TokenV3(0.5), "token_v3", 0.5),
    (Lossy(0.4, "tuned"), "tuned", 0.4),
]


def aimed(pair: Pair, name: str, alpha: float) -> exact.Texts:
    """pi of p and the proposal; confidences are those of the untempered models."""
    return exact.aimed_texts(pair.exact, exact.AIMS[name](alpha), tuple(PROMPT), length(3))


@pytest.mark.parametrize("setting", ["greedy at 1", "all"])
@pytest.mark.parametrize(("rule", "name", "alpha"), AIMED, ids=[name for _, name, _ in AIMED])
def test_a_cascade_mixes_the_target_with_the_proposal(
    setting: str, rule: Rule, name: str, alpha: float
):
    """n = 2,000."""
    pair = Pair(1, *SETTINGS[setting])
    texts = draw(decoder(pair, rule, 3), 3, 2000)
    assert smallest_p_value(texts, aimed(pair, name, alpha)) > ODDS


class ScoresWithTheTargetsSampling(SpeculativeDecoder):
    """Draws at the draft's settings and scores the drafts with the softmax at the target's."""

    def _propose(
        self, draft: ModelSession, texts: Sequence[Text], seen_BV: Tensor | None
    ) -> tuple[Drafted, list[int]]:
        scored: list[Tensor] = []

        def spy(logits: Tensor, params: SamplingParams) -> Tensor:
            scored.append(to_probs(logits, self.sampling))
            return to_probs(logits, params)

        with patch.object(block, "to_probs", spy):
            (tokens_BG, probs_BGV, _), counts = super()._propose(draft, texts, seen_BV)
        return Drafted(tokens_BG, torch.stack(scored, 1) if scored else probs_BGV), counts


class VerifiesWithTheDraftsSampling(SpeculativeDecoder):
    """One temperature for both halves of a block, where there are two."""

    def _verify(
        self,
        target: ModelSession,
        texts: Sequence[Text],
        drafted: Drafted,
        num_drafted: Sequence[int],
        seen_BV: Tensor | None,
    ) -> VerifiedRows:
        with patch.object(self, "sampling", self.draft_sampling):
            return super()._verify(target, texts, drafted, num_drafted, seen_BV)


@pytest.mark.parametrize(("setting", "gamma"), [("greedy at 1", 1), ("cold", 4), ("few", 1)])
@pytest.mark.parametrize("mutant", [ScoresWithTheTargetsSampling, VerifiesWithTheDraftsSampling])
def test_a_q_that_is_not_the_proposal_is_caught(
    mutant: type[SpeculativeDecoder], setting: str, gamma: int
):
    """n = 1,000, half of what the tests above have."""
    pair = Pair(1, *SETTINGS[setting])
    texts = draw(decoder(pair, Lossless(), gamma, mutant), gamma, 1000)
    assert smallest_p_value(texts, pair.plain(gamma)) < ODDS


class ConfidenceOfTheProposal(Chow):
    def defers(self, at: Position) -> Tensor:
        return super().defers(Position.of(at.target, at.draft))


def test_a_confidence_read_from_the_proposal_is_caught():
    pair = Pair(1, *SETTINGS["cold"])
    texts = draw(decoder(pair, ConfidenceOfTheProposal(0.52), 3), 3, 1000)
    assert smallest_p_value(texts, aimed(pair, "chow", 0.52)) < ODDS
