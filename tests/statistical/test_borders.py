"""The text of every rule follows its law, at the borders of all its decisions (`borders.py`).

400 paths a test, none of which the decoder may leave: no sampling, no false alarm. The rules take
block lengths, orders of the models, kinds of bonus, backends and batches by turns. That faults are
seen, also those of half a per cent, the mutants at the end show. That each stream is a stream of
its own, and fresh, `test_distributions.py` samples.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle, product
from random import Random
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from paceline.core import block as core_block
from paceline.core import sampling as core_sampling
from paceline.core.block import Drafted, Verified, verify, verify_block
from paceline.core.rule_base import Bonus
from paceline.core.rules import (
    Chow,
    Lenient,
    Lossless,
    Lossy,
    Rule,
)
from paceline.decode import (
    AutoregressiveDecoder,
    BigLittleDecoder,
    OracleCascade,
    SequenceCascade,
    SpeculativeDecoder,
    TokenCascade,
    block,
)
from paceline.decode.decoder import Decoder
from paceline.decode.text import Text
from paceline.models.contract import ModelSession
from support import exact
from support.borders import Law, num_wrong, walk_while_sure, walk_whole, walks
from support.broken_rules import (
    AcceptsLess,
    AimWithTarget,
    BonusFromTarget,
    ComparesWithTheDraft,
    CutsBeforeItCompares,
    ForgetsWhatWasGivenUp,
    KeepsWithProbability,
    ResidualOfLess,
    ResidualWithTarget,
    SoftmaxesTheResidual,
    SurpriseOfTheDraft,
    UntemperedLeftOut,
    UntunedAim,
    WeighsWithTwiceTheDistance,
)
from support.fakes import TableModel, TableSession
from support.laws import (
    AIMED,
    AT_0,
    AT_TEMPERATURE_0,
    CAUGHT,
    COUNT,
    LOOSE,
    MORE,
    POLICIES,
    PROMPTS,
    SETTINGS,
    WAYS,
    law,
    wrong,
)
from support.rules import Pair, length, table, using

CASES = [
    # by turns too: three of the settings for each rule, and block lengths
    *zip([*LOOSE, *AIMED] * 3, cycle(SETTINGS), cycle((1, 4, 3, 1, 4, 2, 4)), strict=False),
    *product([str(Lossless()), str(Lossy(0.6)), "chow"], MORE, (3,)),
    *(
        (*case, g)
        for case, g in zip(product(AT_0, AT_TEMPERATURE_0), cycle((1, 3, 3)), strict=False)
    ),
    *zip(AIMED, cycle(["greedy", "both greedy"]), cycle((3,)), strict=False),
]


@pytest.mark.parametrize(
    ("name", "setting", "gamma", "way"),
    [(*case, way) for case, way in zip(CASES, cycle(WAYS), strict=False)],
    ids=[f"{name}-{setting}-{gamma}" for name, setting, gamma in CASES],
)
def test_every_decision_of_a_text_is_the_rules(
    name: str, setting: str, gamma: int, way: tuple[int, Bonus, Any, int | None]
):
    order, bonus, backend, batch_size = way
    pair = Pair(order, *(SETTINGS | MORE | AT_TEMPERATURE_0)[setting])
    rule, stated = law(pair, name, gamma, bonus)
    with using(backend):
        assert wrong(pair, rule, stated, bonus, batch_size) == 0


@pytest.mark.parametrize(
    ("name", "setting", "policy", "bonus"),
    [
        *product([str(Lossless()), "chow", "token_v2"], ["cool"], POLICIES, ["rule"]),
        *product([str(Lossless())], ["cold", "greedy drafts", "nucleus"], ["confident"], ["rule"]),
        *product(["chow", "opt", "token_v1", "diff"], ["greedy drafts"], ["confident"], ["rule"]),
        *product([*LOOSE, "bild", "tuned", "token_v3"], ["cool"], ["confident"], ["target"]),
    ],
)
def test_a_policy_changes_the_length_of_blocks_and_no_decision(
    name: str, setting: str, policy: str, bonus: Bonus
):
    """Confidence is the untempered draft's, whatever it draws with."""
    pair = Pair(1, *(SETTINGS | MORE)[setting])
    rule, stated = law(pair, name, 4, bonus)
    assert wrong(pair, rule, replace(stated, policy=POLICIES[policy]), bonus) == 0


@pytest.mark.parametrize("name", [str(Lossless()), str(Lossy(0.5, 1.6)), "token_v3"])
@pytest.mark.parametrize("size", [1, 12])
def test_a_text_of_one_token_is_judged_too_and_a_long_one_to_its_end(name: str, size: int):
    pair = Pair(1)
    assert wrong(pair, *law(pair, name, 3, size=size), batch_size=90) == 0


@pytest.mark.parametrize("setting", ["plain", "all"])
def test_the_baseline_follows_the_target(setting: str):
    pair = Pair(2, *SETTINGS[setting])
    assert baseline(pair) == 0


def baseline(pair: Pair) -> int:
    stated = Law(pair.exact, exact.near(exact.lossless), gamma=0, length=4)
    paths = walks(stated, PROMPTS, COUNT)
    return num_wrong(AutoregressiveDecoder(pair.target, pair.sampling), paths)


def at_the_border(name: str, kind: type[SpeculativeDecoder] = SpeculativeDecoder) -> int:
    """The draft's context ends within the texts, and rows reach its end by turns."""
    pair, room = Pair(1), len(PROMPTS[0]) + 4
    pair.draft = TableModel(table(1, 2), max_length=room)
    rule, stated = law(pair, name, 2, size=6)
    return wrong(pair, rule, replace(stated, room=room), kind=kind)


BORDER_RULES = [str(Lossless()), str(Lossy(0.6)), "chow", "token_v3", "tuned"]


@pytest.mark.parametrize("name", BORDER_RULES)
def test_beyond_the_drafts_context_every_token_follows_the_target(name: str):
    assert at_the_border(name) == 0
    assert at_the_border(name, DrawsANumberAgain) >= CAUGHT


class DrawsANumberAgain(SpeculativeDecoder):
    """Beyond the draft's context every token of a text is drawn with one number."""

    def _verify(self, target: ModelSession, texts: Sequence[Text], *rest: Any) -> Verified:
        streams = [text._choosing for text in texts if not self._drafts(text)]
        numbers = [list(stream._drawn) for stream in streams]
        found = super()._verify(target, texts, *rest)
        for stream, drawn in zip(streams, numbers, strict=True):
            stream._drawn = drawn or stream._drawn
        return found


@pytest.mark.parametrize("name", BORDER_RULES[2:])
def test_a_rule_that_reads_an_emptied_draft_beside_others_is_caught(name: str):
    def mutant(logits: Any, drafted: Any, num_drafted: Any, *rest: Any) -> Any:
        return verify_block(logits, drafted, num_drafted.clamp(min=0), *rest)

    with patch.object(block, "verify_block", mutant):
        assert at_the_border(name) >= CAUGHT


# Cascades that verify nothing


def while_sure(decoder: Decoder, models: exact.Models, most: int, rollback: float | None) -> int:
    rng, given = Random(0), {"sure": 0.4, "most": most, "rollback": rollback}
    paths = [
        walk_while_sure(models, PROMPTS[row % len(PROMPTS)], length(3), rng, **given)
        for row in range(COUNT)
    ]
    return num_wrong(decoder, paths, batch_size=150)


@pytest.mark.parametrize(("setting", "most"), [("plain", 3), ("all", 1), ("all", 3)])
@pytest.mark.parametrize("rollback", [None, 1.9])
def test_a_draft_that_writes_while_it_is_sure(setting: str, rollback: float | None, most: int):
    """TokenCascade without, BiLD with rollback."""
    pair = Pair(1, *SETTINGS[setting])
    decoder: Decoder = (
        TokenCascade(pair.target, pair.draft, 0.6, pair.sampling, most)
        if rollback is None
        else BigLittleDecoder(pair.target, pair.draft, 0.4, rollback, pair.sampling, most)
    )
    assert while_sure(decoder, pair.exact, most, rollback) == 0


@pytest.mark.parametrize(
    "make",
    [
        # asks the target one token late; keeps to the draft at a lower confidence; another bound of
        # surprise; verifies nothing
        lambda pair: BigLittleDecoder(pair.target, pair.draft, 0.4, 1.9, most_drafted=4),
        lambda pair: BigLittleDecoder(pair.target, pair.draft, 0.3, 1.9, most_drafted=3),
        lambda pair: BigLittleDecoder(pair.target, pair.draft, 0.4, 1.5, most_drafted=3),
        lambda pair: TokenCascade(pair.target, pair.draft, 0.6, most_drafted=3),
    ],
)
def test_a_broken_draft_that_writes_while_it_is_sure_is_caught(make: Callable[[Pair], Decoder]):
    pair = Pair(1)
    assert while_sure(make(pair), pair.exact, 3, 1.9) >= CAUGHT


ORACLES = ["bild", "chow", "chow_log", "diff", "diff_log", "opt", "opt_log"]


def oracle(pair: Pair, name: str, rule: Rule) -> int:
    stated = Law(pair.exact, exact.near(exact.lossless), 0, 5, AIMED[name][1])
    decoder = OracleCascade(pair.target, pair.draft, rule, pair.sampling)
    return num_wrong(decoder, walks(stated, PROMPTS, COUNT), batch_size=150)


@pytest.mark.parametrize("name", ORACLES)
def test_an_oracle_cascade_follows_the_rules_aim(name: str):
    pair = Pair(1, *SETTINGS["all"])
    assert oracle(pair, name, AIMED[name][0]) == 0
    assert oracle(pair, name, Chow(1.0)) >= CAUGHT


def sequences(decoder: Decoder, models: exact.Models, alpha: float, *, normalise: bool) -> int:
    rng, given = Random(0), {"alpha": alpha, "normalise": normalise}
    paths = [
        walk_whole(models, PROMPTS[row % len(PROMPTS)], 5, rng, **given) for row in range(COUNT)
    ]
    return num_wrong(decoder, paths, batch_size=150)


@pytest.mark.parametrize("setting", ["cool", "all"])
@pytest.mark.parametrize(("alpha", "normalise"), [(0.999, False), (0.75, True)])
def test_a_sequence_cascade_keeps_probable_responses_and_lets_the_target_answer_the_rest(
    alpha: float, setting: str, *, normalise: bool
):
    pair = Pair(1, *SETTINGS[setting])
    make = partial(SequenceCascade, pair.target, pair.draft, sampling=pair.sampling)
    found = make(alpha, normalise=normalise)
    assert sequences(found, pair.exact, alpha, normalise=normalise) == 0
    other = make(alpha, normalise=not normalise)
    assert sequences(other, pair.exact, alpha, normalise=normalise) >= CAUGHT


# Faults of a rule, each beside the law that it should follow (`broken_rules.py`)

LENIENT = str(Lenient("linear", 0.3))
BROKEN: list[tuple[Rule, str, str]] = [
    (SoftmaxesTheResidual(), str(Lossless()), "plain"),
    (AcceptsLess(), str(Lossless()), "plain"),
    (ResidualOfLess(), str(Lossless()), "plain"),
    (ResidualWithTarget(), str(Lossless()), "plain"),
    # a rule that does another than it states
    (Lossy(0.602), str(Lossy(0.6)), "plain"),
    (Lossy(0.5, 1.0), str(Lossy(0.5, 1.6)), "plain"),
    (Lossy(0.5, 1.608), str(Lossy(0.5, 1.6)), "plain"),
    (Lenient("linear", 0.6), str(Lenient("square", 0.6)), "plain"),
    (Lenient("square", 0.603), str(Lenient("square", 0.6)), "plain"),
    (Lenient("square", 0.3), str(Lenient("exponential", 0.3)), "plain"),
    (Lenient("exponential", 0.3015), str(Lenient("exponential", 0.3)), "plain"),
    (Lossless(), str(Lossy(0.6)), "plain"),
    (BonusFromTarget(0.52), "chow", "plain"),
    (UntemperedLeftOut(0.52), "chow", "cool"),
    (UntemperedLeftOut(0.52), "chow", "cold"),
    (ForgetsWhatWasGivenUp(0.3), "token_v2", "plain"),
    (AimWithTarget(0.3), "token_v2", "plain"),
    (SurpriseOfTheDraft(1.9), "bild", "plain"),
    (WeighsWithTwiceTheDistance(0.2), "opt", "plain"),
    (UntunedAim(0.4, "tuned"), "tuned", "plain"),
    (Lossy(0.402, "tuned"), "tuned", "plain"),
    (ComparesWithTheDraft("linear", 0.3), LENIENT, "greedy"),
    (KeepsWithProbability("linear", 0.3), LENIENT, "greedy"),
    (Lenient("square", 0.3), LENIENT, "greedy"),
    (Lenient("linear", 0.9), LENIENT, "greedy"),
    (Lossy(0.3), LENIENT, "greedy"),
    (CutsBeforeItCompares("exponential", 0.4), str(Lenient("exponential", 0.4)), "greedy"),
]


@pytest.mark.parametrize(
    ("mutant", "name", "setting"),
    BROKEN,
    ids=[f"{type(mutant).__name__} {mutant}" for mutant, *_ in BROKEN],
)
def test_a_broken_rule_is_caught(mutant: Rule, name: str, setting: str):
    pair = Pair(1, *(SETTINGS | MORE | AT_TEMPERATURE_0)[setting])
    _, stated = law(pair, name, 4)
    assert wrong(pair, mutant, stated) >= CAUGHT


# Faults of a decoder


class FirstFromTarget(SpeculativeDecoder):
    """Takes the first token from the target's pass over the prompt."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.verifies_first = False


class FirstFromTheRule(SpeculativeDecoder):
    """Drafts the first token."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.verifies_first = True


class BonusFromTheRule(SpeculativeDecoder):
    """Takes the bonus token from pi, and the first from the target."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **(named | {"bonus": "rule"}))
        self.verifies_first = False


@pytest.mark.parametrize("name", AIMED)
def test_a_bonus_or_a_first_token_that_is_not_the_laws_is_caught(name: str):
    pair = Pair(1)
    rule, stated = law(pair, name, 1)
    assert wrong(pair, rule, stated, kind=FirstFromTarget) >= CAUGHT
    rule, stated = law(pair, name, 1, "target")
    for kind in (FirstFromTheRule, BonusFromTheRule):
        assert wrong(pair, rule, stated, "target", kind=kind) >= CAUGHT
    assert wrong(pair, rule, stated, "rule") >= CAUGHT


def proposing(score: Callable[[Tensor, core_sampling.SamplingParams], Tensor]) -> Any:
    """A decoder that hands `score` to the rule as q, and draws as before."""

    class Proposes(SpeculativeDecoder):
        def _propose(
            self, draft: ModelSession, texts: Sequence[Text], seen_BV: Tensor | None
        ) -> tuple[Drafted, list[int]]:
            scored: list[Tensor] = []

            def spy(logits: Tensor, params: core_sampling.SamplingParams) -> Tensor:
                scored.append(score(logits, self.sampling))
                return core_sampling.to_probs(logits, params)

            with patch.object(core_block, "to_probs", spy):
                (tokens_BG, probs_BGV, _), counts = super()._propose(draft, texts, seen_BV)
            return Drafted(tokens_BG, torch.stack(scored, 1) if scored else probs_BGV), counts

    return Proposes


# jaymody/speculative-sampling#3, xLLM#2175: an argmax draft scored with softmax q
ScoresWithTheTargetsSampling = proposing(core_sampling.to_probs)
# transformers#47932: the returned q was not the proposal
ReturnsUnshapedDraft = proposing(lambda logits, _: logits.softmax(-1).float())


class VerifiesWithTheDraftsSampling(SpeculativeDecoder):
    """One temperature for both halves of a block, where there are two."""

    def _verify(self, *given: Any) -> Verified:
        with patch.object(self, "sampling", self.draft_sampling):
            return super()._verify(*given)


@pytest.mark.parametrize(
    ("mutant", "setting"),
    [
        *product(
            [ScoresWithTheTargetsSampling, VerifiesWithTheDraftsSampling],
            ["greedy drafts", "cold", "few"],
        ),
        *product([ReturnsUnshapedDraft], ["cool", "top_k", "top_p"]),
    ],
)
def test_a_q_that_is_not_the_proposal_is_caught(mutant: type[SpeculativeDecoder], setting: str):
    pair = Pair(1, *(SETTINGS | MORE)[setting])
    assert wrong(pair, *law(pair, str(Lossless()), 4), kind=mutant) >= CAUGHT


@pytest.mark.parametrize(("name", "gamma"), [(str(Lossless()), 1), (LENIENT, 3)])
def test_a_bonus_token_drawn_from_the_draft_is_caught(name: str, gamma: int):
    pair = Pair(1)

    def mutant(drafted: Drafted, num_drafted_B: Tensor, p: Tensor, *rest: Any):
        rows, p = torch.arange(len(p)), p.clone()
        if drafted.tokens_BG.shape[1]:
            last_B = drafted.tokens_BG[rows, (num_drafted_B - 1).clamp(min=0)]
            p[rows, num_drafted_B] = table(1, 2).float()[last_B]
        return verify(drafted, num_drafted_B, p, *rest)

    with patch.object(core_block, "verify", mutant):
        assert wrong(pair, *law(pair, name, gamma)) >= CAUGHT


# Soup#345: a penalty that one model alone applies, or that forgets what the block has drafted
def test_a_penalty_that_does_not_see_the_drafted_tokens_is_caught():
    def nothing_new(tokens_BN: Tensor, seen_BV: Tensor) -> Tensor:
        return seen_BV[:, None].expand(-1, tokens_BN.shape[1] + 1, -1)

    pair = Pair(1, exact.Shaping(repetition_penalty=1.5))
    with patch.object(core_block, "mark_seen", nothing_new):
        assert wrong(pair, *law(pair, str(Lossless()), 4)) >= CAUGHT


class ForgetsNothing(TableSession):
    def rollback(self, counts: Sequence[int]) -> None:
        """Rejected tokens stay in the cache."""


class Stale(TableModel):
    def start_session(self) -> TableSession:
        return ForgetsNothing(self)


# transformers#48280, mlx-vlm#2113: rejected tokens that stay in the target's cache
def test_a_target_that_does_not_roll_back_is_caught():
    pair = Pair(2)
    pair.target = Stale(pair.target._log_probs.exp())
    assert wrong(pair, *law(pair, str(Lossless()), 3)) >= CAUGHT


def first_uniform_for_all(probs_BV: Tensor, uniforms_B: Tensor) -> Tensor:
    return core_sampling.sample(probs_BV, uniforms_B[:1].expand(len(probs_BV)))


def noisy_argmax(probs_BV: Tensor, uniforms_B: Tensor) -> Tensor:
    noise = torch.stack([(uniforms_B * 7**v) % 1 for v in range(probs_BV.shape[-1])], -1)
    return (probs_BV * noise).argmax(-1)


@pytest.mark.parametrize("mutant", [first_uniform_for_all, noisy_argmax])
def test_a_baseline_that_samples_wrongly_is_caught(mutant: Callable[[Tensor, Tensor], Tensor]):
    with patch("paceline.decode.decoder.sample", mutant):
        assert baseline(Pair(2)) >= CAUGHT
