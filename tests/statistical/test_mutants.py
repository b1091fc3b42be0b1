"""Broken decoders that the tests of `test_distributions.py` must catch, by the same procedure.

Each mutant is a bug that somebody had. A mutant counts as caught where the smallest p-value is
below 1e-4, the threshold at which those tests fail, with n = 1,000 texts, half as many as there.
What no such test can see is a draft that is merely bad (a token missing from its cache): the text
stays exact then, and `test_decode_speculative.py` looks into the sessions instead.
"""

from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from paceline.core import block
from paceline.core import sampling as core_sampling
from paceline.core.block import Drafted, Verified, verify
from paceline.core.rule_base import Position
from paceline.core.rules import Lenient, Lossless, Lossy, capped_ratio
from paceline.decode import AutoregressiveDecoder, SpeculativeDecoder
from paceline.decode.text import Text
from paceline.models.contract import ModelSession
from paceline.rng import named_generator
from support import exact
from support.fakes import TableModel, TableSession
from support.rules import ODDS, PROMPT, Pair, draw, smallest_p_value

TOP_K = exact.Shaping(top_k=3)
COUNT = 1000


class RecoversFromTarget(Lossless):
    def residual_at(self, at: Position) -> Tensor:
        return at.target


class SoftmaxesTheResidual(Lossless):
    def residual_at(self, at: Position) -> Tensor:
        return (at.target - at.draft).clamp(min=0).softmax(-1)


class AcceptsTheWrongWayRound(Lossless):
    def accept_at(self, at: Position) -> Tensor:
        return capped_ratio(at.draft, at.target)


class AcceptsEverything(Lossless):
    def accept_at(self, at: Position) -> Tensor:
        return torch.ones_like(at.target)


def p_value(
    rule: Lossless,
    gamma: int,
    pair: Pair,
    decoder: type[SpeculativeDecoder] = SpeculativeDecoder,
) -> float:
    """The test procedure: the smallest p-value of this decoder's text against the target's."""
    made = decoder(pair.target, pair.draft, rule, gamma=gamma, sampling=pair.sampling)
    return smallest_p_value(draw(made, gamma, COUNT), pair.plain(gamma))


# transformers#28508: softmaxed residual
@pytest.mark.parametrize("gamma", [1, 4])
@pytest.mark.parametrize(
    "mutant",
    [RecoversFromTarget, SoftmaxesTheResidual, AcceptsTheWrongWayRound, AcceptsEverything],
)
def test_a_broken_rule_is_caught(mutant: type[Lossless], gamma: int):
    assert p_value(mutant(), gamma, Pair(order=1)) < ODDS


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
    def mutant(seed: int, name: str) -> torch.Generator:
        return named_generator(seed, "shared" if name in shared else name)

    with patch("paceline.decode.text.named_generator", mutant):
        assert p_value(Lossless(), gamma, Pair(order=1)) < ODDS


def argmax(probs_BV: Tensor, _uniforms_B: Tensor) -> Tensor:
    return probs_BV.argmax(-1)


class DraftsGreedily(SpeculativeDecoder):
    """Drafts the likeliest token and says so: q is one-hot."""

    one_hot = True

    def _propose(
        self, draft: ModelSession, texts: Sequence[Text], seen_BV: Tensor | None
    ) -> tuple[Drafted, list[int]]:
        with patch.object(block, "sample", argmax):
            (tokens_BG, probs_BGV, _), counts = super()._propose(draft, texts, seen_BV)
        if self.one_hot:
            probs_BGV = torch.nn.functional.one_hot(tokens_BG, probs_BGV.shape[-1]).float()
        return Drafted(tokens_BG, probs_BGV), counts


class ScoresGreedyDraftsWithSoftmax(DraftsGreedily):
    one_hot = False


# jaymody/speculative-sampling#3, xLLM#2175: an argmax draft scored with softmax q
@pytest.mark.parametrize("gamma", [1, 4])
def test_greedy_drafts_scored_with_softmax_are_caught_and_scored_one_hot_are_exact(gamma: int):
    pair = Pair(order=1)
    assert p_value(Lossless(), gamma, pair, ScoresGreedyDraftsWithSoftmax) < ODDS
    assert p_value(Lossless(), gamma, pair, DraftsGreedily) > ODDS


class ReturnsUnshapedDraft(SpeculativeDecoder):
    """Draws from the shaped q and hands the unshaped one to the rule."""

    def _propose(
        self, draft: ModelSession, texts: Sequence[Text], seen_BV: Tensor | None
    ) -> tuple[Drafted, list[int]]:
        unshaped: list[Tensor] = []

        def spy(logits: Tensor, params: core_sampling.SamplingParams) -> Tensor:
            unshaped.append(core_sampling.to_probs(logits, core_sampling.SamplingParams()))
            return core_sampling.to_probs(logits, params)

        with patch.object(block, "to_probs", spy):
            (tokens_BG, probs_BGV, _), counts = super()._propose(draft, texts, seen_BV)
        return Drafted(tokens_BG, torch.stack(unshaped, 1) if unshaped else probs_BGV), counts


# transformers#47932: the returned q was not the proposal
@pytest.mark.parametrize("gamma", [1, 4])
@pytest.mark.parametrize(
    "shaping", [TOP_K, exact.Shaping(top_p=0.7), exact.Shaping(temperature=0.5)], ids=str
)
def test_a_returned_q_that_is_not_the_proposal_is_caught(shaping: exact.Shaping, gamma: int):
    assert p_value(Lossless(), gamma, Pair(1, shaping), ReturnsUnshapedDraft) < ODDS


def bonus_from_draft(pair: Pair) -> Callable[..., Verified]:
    table = pair.draft._log_probs.exp().float()

    def mutant(drafted: Drafted, num_drafted_B: Tensor, p: Tensor, *rest: Any):
        drafted_BG = drafted.tokens_BG
        rows = torch.arange(len(drafted_BG))
        p = p.clone()
        if drafted_BG.shape[1]:
            last_B = drafted_BG[rows, (num_drafted_B - 1).clamp(min=0)]
            p[rows, num_drafted_B] = table[last_B]
        return verify(drafted, num_drafted_B, p, *rest)

    return mutant


@pytest.mark.parametrize("gamma", [1, 2])
def test_a_bonus_token_drawn_from_the_draft_is_caught(gamma: int):
    pair = Pair(order=1)
    with patch.object(block, "verify", bonus_from_draft(pair)):
        assert p_value(Lossless(), gamma, pair) < ODDS


@pytest.mark.parametrize("gamma", [1, 3])
def test_a_bonus_token_drawn_from_the_draft_is_caught_under_a_lossy_rule(gamma: int):
    pair = Pair(order=1)
    expected = pair.speculative(exact.lenient("linear", 0.3), gamma)
    decoder = SpeculativeDecoder(pair.target, pair.draft, Lenient("linear", 0.3), gamma=gamma)
    with patch.object(block, "verify", bonus_from_draft(pair)):
        assert smallest_p_value(draw(decoder, gamma, COUNT), expected) < ODDS


@pytest.mark.parametrize(
    ("done", "stated"),
    [
        (Lossy(0.5, 1.0), exact.lossy(0.5, 1.6)),
        (Lenient("linear", 0.6), exact.lenient("square", 0.6)),
        (Lenient("square", 0.6), exact.lenient("exponential", 0.6)),
        (Lossless(), exact.lossy(0.6)),
    ],
    ids=["beta left out", "linear for square", "square for exponential", "no leniency"],
)
def test_a_rule_that_does_another_than_it_states_is_caught(
    done: Lossless | Lossy | Lenient, stated: exact.RuleVectors
):
    """n = 2,000: some of these differ by little."""
    pair = Pair(order=1)
    texts = draw(SpeculativeDecoder(pair.target, pair.draft, done, gamma=3), 3, 2000)
    assert smallest_p_value(texts, pair.speculative(stated, 3)) < ODDS


# Soup#345: a penalty that one model alone applies, or that forgets what the block has drafted
def test_a_penalty_that_does_not_see_the_drafted_tokens_is_caught():
    def nothing_new(tokens_BN: Tensor, seen_BV: Tensor) -> Tensor:
        return seen_BV[:, None].expand(-1, tokens_BN.shape[1] + 1, -1)

    pair = Pair(1, exact.Shaping(repetition_penalty=2.0))
    with patch.object(block, "mark_seen", nothing_new):
        assert p_value(Lossless(), 4, pair) < ODDS


class ForgetsNothing(TableSession):
    def rollback(self, counts: Sequence[int]) -> None:
        """Rejected tokens stay in the cache."""


class Stale(TableModel):
    def start_session(self) -> TableSession:
        return ForgetsNothing(self)


# transformers#48280, mlx-vlm#2113: rejected tokens that stay in the target's cache
def test_a_target_that_does_not_roll_back_is_caught():
    pair = Pair(order=2)
    pair.target = Stale(pair.target._log_probs.exp())
    assert p_value(Lossless(), 3, pair) < ODDS


def first_uniform_for_all(probs_BV: Tensor, uniforms_B: Tensor) -> Tensor:
    return core_sampling.sample(probs_BV, uniforms_B[:1].expand(len(probs_BV)))


def noisy_argmax(probs_BV: Tensor, uniforms_B: Tensor) -> Tensor:
    noise = torch.stack([(uniforms_B * 7**v) % 1 for v in range(probs_BV.shape[-1])], -1)
    return (probs_BV * noise).argmax(-1)


@pytest.mark.parametrize("mutant", [first_uniform_for_all, noisy_argmax])
def test_a_baseline_that_samples_wrongly_is_caught(mutant: Callable[[Tensor, Tensor], Tensor]):
    pair = Pair(order=2)
    with patch("paceline.decode.decoder.sample", mutant), patch.object(block, "sample", mutant):
        texts = draw(AutoregressiveDecoder(pair.target), 1, 1000)
    assert smallest_p_value(texts, pair.plain(1)) < ODDS


@pytest.mark.parametrize(("mutant", "gamma"), [(AcceptsEverything, 1), (RecoversFromTarget, 4)])
def test_a_broken_rule_is_caught_in_one_long_text(mutant: type[Lossless], gamma: int):
    """n = 900 tokens of one text, as in the test of small batches."""
    pair = Pair(order=1, shaping=exact.Shaping(temperature=0.7))
    decoder = SpeculativeDecoder(
        pair.target, pair.draft, mutant(), gamma=gamma, sampling=pair.sampling
    )
    (generation,) = decoder.generate([PROMPT], 900, seed=20)
    assert exact.transitions_p_value([generation.tokens], pair.p, order=1) < ODDS
