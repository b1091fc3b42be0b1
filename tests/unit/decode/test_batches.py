"""A request gives one text and one set of counts, alone or in any company; the baseline."""

import math
from collections.abc import Callable

import pytest
import torch

from paceline.core.rules import Diff, Lenient, Lossless, Lossy, Rule
from paceline.core.sampling import SamplingParams
from paceline.core.stats import DecodeStats
from paceline.decode import (
    AutoregressiveDecoder,
    BigLittleDecoder,
    Confident,
    OracleCascade,
    SequenceCascade,
    SpeculativeDecoder,
    TokenCascade,
)
from paceline.decode.decoder import Decoder
from paceline.decode.draft_policies import DraftPolicy
from paceline.models import prepare_for_decoding
from paceline.models.prepare import with_cuda_graphs
from support.fakes import TableModel
from support.models import tiny_pair

PROMPTS = [[1], [2, 0, 3, 3, 7, 1, 1], [4, 1], [6, 6, 6], [5, 5], [1]]
SEEDS = [11, 3, 3, 40, 7, 12]
SAMPLINGS = [
    SamplingParams(temperature=0),
    SamplingParams(),
    SamplingParams(temperature=0.7, top_k=5, top_p=0.9, repetition_penalty=1.2),
]


def pair() -> tuple[TableModel, TableModel]:
    rng = torch.Generator().manual_seed(4)
    logits = 1.5 * torch.randn(64, 8, generator=rng, dtype=torch.float64)
    noise = torch.randn(64, 8, generator=rng, dtype=torch.float64)
    target = TableModel(logits.softmax(-1), eos_token_ids=(7,))
    return target, TableModel((logits + noise).softmax(-1))


def test_the_target_reads_a_batch_as_often_as_its_busiest_row():
    target, draft = pair()
    found = SpeculativeDecoder(target, draft, gamma=3).generate(PROMPTS, 25, eos_token_ids=[])
    assert target.num_passes == 1 + max(generation.stats.num_target_calls for generation in found)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "plain", "shaped"])
@pytest.mark.parametrize(
    "kind",
    [
        lambda target, draft, sampling: SpeculativeDecoder(
            target, draft, gamma=3, sampling=sampling
        ),
        # accepts nearly all, so that a prompt of one token comes beside drafts that lack two
        lambda target, draft, sampling: SpeculativeDecoder(
            target, draft, Lenient("linear", 1e-6), 3, sampling
        ),
        lambda target, draft, sampling: AutoregressiveDecoder(target, sampling),
        lambda target, draft, sampling: TokenCascade(target, draft, 0.7, sampling),
        lambda target, draft, sampling: OracleCascade(target, draft, Diff(0.1), sampling),
        lambda target, draft, sampling: BigLittleDecoder(target, draft, 0.4, 1.0, sampling),
        lambda target, draft, sampling: SequenceCascade(target, draft, 0.999, sampling),
    ],
    ids=["speculative", "lenient", "plain", "token", "oracle", "bild", "sequence"],
)
def test_a_text_that_waited_for_a_place_is_the_one_that_did_not(
    kind: Callable[..., Decoder], sampling: SamplingParams
):
    decoder = kind(*pair(), sampling)
    at_once = decoder.generate(PROMPTS * 2, 12, seed=3)
    found = {
        size: decoder.generate(PROMPTS * 2, 12, seed=3, batch_size=size) for size in (1, 2, 5, 50)
    }
    assert [size for size in found if found[size] != at_once] == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["transformers", "prepared", "fixed"])
@pytest.mark.parametrize("rule", [Lossless(), Lenient("linear", 1e-9), Diff(0.1)], ids=str)
def test_so_it_is_with_models_that_remember(rule: Rule, kind: str):
    target, draft = tiny_pair()
    if kind == "prepared":
        for model in (target, draft):
            model.hf.bfloat16().float()  # so that few tokens are read in one compiled pass
        target, draft = prepare_for_decoding(target), prepare_for_decoding(draft)
    if kind == "fixed":
        target, draft = with_cuda_graphs(target), with_cuda_graphs(draft)
    decoder = SpeculativeDecoder(target, draft, rule, gamma=3)
    prompts = [[3 + row] * (1 + row % 4) for row in range(7)]
    at_once = decoder.generate(prompts, 11, seed=3)
    assert decoder.generate(prompts, 11, seed=3, batch_size=3) == at_once
    assert [
        decoder.generate([one], 11, seed=3 + row)[0] for row, one in enumerate(prompts)
    ] == at_once


def test_a_place_is_taken_as_soon_as_it_is_free():
    target, _ = pair()
    decoder = AutoregressiveDecoder(target)
    found = decoder.generate(PROMPTS * 4, 40, seed=1, batch_size=3)
    lengths = [len(generation.tokens) for generation in found]
    ends = sorted(lengths[:3])  # when each of three rows is free, in passes
    for length in lengths[3:]:
        ends = sorted([ends[0] + length, *ends[1:]])
    assert target.num_passes <= max(ends) + len(found) - 3  # each newcomer's prompt is a pass
    apart = sum(max(lengths[start : start + 3]) for start in range(0, len(lengths), 3))
    assert target.num_passes < apart


class OnceOnly(DraftPolicy):
    """Drafts until the target has judged a token of the text, and never again."""

    def length(self, num_accepted: int, num_examined: int, most: int) -> int:
        return 0 if num_examined else most


@pytest.mark.parametrize("rule", [Lossless(), Diff(0.1)], ids=["lossless", "diff"])
def test_a_draft_that_rested_knows_the_whole_text_when_it_drafts_for_another(rule: Rule):
    target, _ = pair()
    policy = OnceOnly()
    decoder = SpeculativeDecoder(target, target, rule, gamma=4, policy=policy, bonus="target")
    prompts = [[1], [2, 3], [4]] * 10
    found = decoder.generate(prompts, 40, batch_size=2)
    # p = q after the same tokens, so none is rejected
    total = sum((generation.stats for generation in found), DecodeStats())
    assert total.num_recovered == 0
    assert total.num_accepted > len(prompts)
    assert max(len(generation.tokens) for generation in found) > 4 + 2 + max(map(len, prompts))
    decoder = SpeculativeDecoder(*pair(), rule, gamma=4, policy=policy, bonus="target")
    alone = [decoder.generate([prompt], 40, seed=[row])[0] for row, prompt in enumerate(prompts)]
    assert decoder.generate(prompts, 40, batch_size=2) == alone


def test_equal_requests_give_equal_texts_and_other_seeds_other_ones():
    decoder = SpeculativeDecoder(*pair(), gamma=3)
    same = decoder.generate([[1, 2]] * 4, 30, seed=[5, 5, 6, 5], eos_token_ids=[])
    assert same[0] == same[1] == same[3]
    assert same[2].tokens != same[0].tokens
    assert decoder.generate([[1, 2]], 30, seed=5, eos_token_ids=[]) == same[:1]


class AtTheEnd(DraftPolicy):
    """Drafts first, and again where fewer than three tokens are left."""

    def length(self, num_accepted: int, num_examined: int, most: int) -> int:
        return 0 if num_examined and most == 3 else most


@pytest.mark.parametrize("draft_limit", [None, 24, 14, 6])
@pytest.mark.parametrize(
    "kind",
    [
        lambda target, draft: SpeculativeDecoder(target, draft, gamma=3),
        lambda target, draft: SpeculativeDecoder(target, draft, Diff(0.1), 3),
        lambda target, draft: SpeculativeDecoder(target, draft, Lossy(0.4, "tuned"), 3),
        lambda target, draft: SpeculativeDecoder(target, draft, gamma=3, policy=Confident(0.3)),
        lambda target, draft: SpeculativeDecoder(target, draft, gamma=3, policy=AtTheEnd()),
        lambda target, draft: TokenCascade(target, draft, 0.7, most_drafted=4),
        lambda target, draft: BigLittleDecoder(target, draft, 0.3, 2.0, most_drafted=4),
        lambda target, draft: OracleCascade(target, draft, Diff(0.1)),
        lambda target, draft: SequenceCascade(target, draft, 0.999999),
    ],
    ids=["lossless", "diff", "tuned", "confident", "rested", "token", "bild", "oracle", "sequence"],
)
def test_a_context_limit_cuts_each_row_where_it_would_be_cut_alone(
    kind: Callable[..., Decoder], draft_limit: int | None
):
    target, draft = pair()
    target.max_length, draft.max_length = 24, draft_limit
    decoder = kind(target, draft)
    together = decoder.generate(PROMPTS, 100, seed=SEEDS, eos_token_ids=[], batch_size=4)
    for prompt, seed, generation in zip(PROMPTS, SEEDS, together, strict=True):
        assert decoder.generate([prompt], 100, seed=[seed], eos_token_ids=[]) == [generation]
        assert len(prompt) + len(generation.tokens) == 24


def baseline(**options: object) -> TableModel:
    return TableModel.random(6, order=2, seed=1, spread=1.5, **options)  # pyright: ignore


def test_greedy_decoding_does_not_depend_on_the_seed_and_sampling_does():
    for temperature, texts in ((0.0, 1), (1.0, 8)):
        decoder = AutoregressiveDecoder(baseline(), SamplingParams(temperature=temperature))
        found = decoder.generate([[1, 2]] * 8, 30, seed=3)
        assert len({tuple(generation.tokens) for generation in found}) == texts


def test_every_token_takes_one_pass_and_is_counted_once():
    model = baseline()
    (generation,) = AutoregressiveDecoder(model).generate([[1]], 12)
    stats = generation.stats
    assert (stats.num_prefill_tokens, stats.num_bonus, stats.num_blocks) == (1, 11, 11)
    assert (stats.num_drafted, stats.num_accepted, stats.num_recovered) == (0, 0, 0)
    assert stats.block_efficiency == 1
    assert math.isnan(stats.acceptance_rate)
    assert model.num_passes == stats.num_target_calls + 1


def test_the_batch_goes_on_only_as_long_as_its_longest_row():
    # Token 5 ends a text; the rows end at different times and leave.
    model = baseline(eos_token_ids=(5,))
    found = AutoregressiveDecoder(model).generate([[1, 2]] * 6, 200, seed=0)
    lengths = {len(generation.tokens) for generation in found}
    assert len(lengths) > 1
    assert model.num_passes == max(lengths)
    for generation in found:
        assert generation.tokens.index(5) == len(generation.tokens) - 1
        assert generation.stop_reason == "eos"
