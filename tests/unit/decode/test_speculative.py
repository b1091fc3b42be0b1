"""Speculative decoding on table models: the same text as the target alone, in fewer passes."""

import itertools
from unittest.mock import Mock

import pytest
import torch

from paceline.core.rule_base import Bonus
from paceline.core.rules import Chow, Lenient, Lossless, Lossy, Rule, TokenV3
from paceline.core.sampling import SamplingParams
from paceline.core.stats import DecodeStats
from paceline.decode import AutoregressiveDecoder, Generation, SpeculativeDecoder, speculative
from paceline.errors import UsageError
from support.fakes import TableModel, TableSession

PROMPTS = [[1], [2, 0, 3, 3, 7], [4, 1], [6, 6, 6]]


def pair(eos_token_ids: tuple[int, ...] = ()) -> tuple[TableModel, TableModel]:
    """A target and a draft that agrees with it on about half of the tokens; both see two tokens."""
    rng = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(64, 8, generator=rng, dtype=torch.float64)
    noise = 1.5 * torch.randn(64, 8, generator=rng, dtype=torch.float64)
    target = TableModel(logits.softmax(-1), eos_token_ids=eos_token_ids)
    return target, TableModel((logits + noise).softmax(-1))


class Watched(TableModel):
    """A table model that keeps its sessions for the test to look into."""

    def start_session(self) -> TableSession:
        self.session = super().start_session()
        return self.session


def check_counts(generation: Generation, gamma: int, rule: Rule | None = None) -> None:
    stats = generation.stats
    # the first token is the target's own where nothing is lost, else the first block's
    assert stats.num_prefill_tokens == (rule or Lossless()).exact
    assert stats.num_prefill_tokens + stats.num_emitted == len(generation.tokens)
    assert stats.num_emitted <= stats.num_blocks * (gamma + 1)
    assert stats.num_accepted <= stats.num_drafted <= stats.num_blocks * gamma
    assert sum(stats.accepted_histogram) == stats.num_blocks
    weighted = sum(count * blocks for count, blocks in enumerate(stats.accepted_histogram))
    assert weighted == stats.num_accepted


@pytest.mark.parametrize(
    ("gamma", "drafts_at"), [(1, None), (2, None), (5, None), (9, None), (4, 0.4), (4, 1), (4, 2)]
)
@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_at_temperature_0_a_text_is_the_greedy_one_however_the_draft_draws(
    gamma: int, drafts_at: float | None, penalty: float
):
    target, draft = pair()
    sampling = SamplingParams(temperature=0, repetition_penalty=penalty)
    drafts = None if drafts_at is None else SamplingParams(temperature=drafts_at)
    plain = AutoregressiveDecoder(target, sampling).generate(PROMPTS, 50)
    decoder = SpeculativeDecoder(target, draft, None, gamma, sampling, draft_sampling=drafts)
    fast = decoder.generate(PROMPTS, 50)
    assert [generation.tokens for generation in fast] == [g.tokens for g in plain]
    num_accepted = sum((one.stats for one in fast), DecodeStats()).num_accepted
    assert drafts is None or num_accepted > 10
    for generation in fast:
        check_counts(generation, gamma)


def test_a_greedy_draft_of_the_target_itself_is_accepted_with_the_targets_largest_probability():
    """q is one-hot, so min(1, p/q) = p(argmax): on a table of one context, 0.6 exactly."""
    table = TableModel(torch.tensor([0.1, 0.6, 0.3]).repeat(3, 1))
    decoder = SpeculativeDecoder(
        table, table, gamma=2, draft_sampling=SamplingParams(temperature=0)
    )
    found = decoder.generate([[0]] * 200, 40, eos_token_ids=[])
    total = sum((one.stats for one in found), DecodeStats())
    # about 6,400 examined: 5 deviations
    assert abs(total.acceptance_rate - 0.6) < 0.031


def test_a_penalty_of_the_drafts_own_is_refused():
    target, draft = pair()
    sampling = SamplingParams(repetition_penalty=1.2)
    for penalty in (1.0, 1.2):
        drafts = SamplingParams(temperature=0, repetition_penalty=penalty)
        decoder = SpeculativeDecoder(target, draft, sampling=sampling, draft_sampling=drafts)
        assert decoder.draft_sampling == SamplingParams(temperature=0, repetition_penalty=1.2)
    with pytest.raises(UsageError, match=r"draft_sampling.repetition_penalty is 1.3 .* 1.2;"):
        SpeculativeDecoder(
            *(target, draft, None, 4, sampling),
            draft_sampling=SamplingParams(repetition_penalty=1.3),
        )


GRID = list(itertools.product([0.0, 0.3, 1.0, 1.7], [0, 3], [1.0, 0.7], [1.0, 1.4]))


# Soup#345 (self-draft scored .862 under a penalty), transformers#47932, DeepSpec#31
@pytest.mark.parametrize(("temperature", "top_k", "top_p", "penalty"), GRID)
def test_a_draft_equal_to_its_target_is_accepted_always(
    temperature: float, top_k: int, top_p: float, penalty: float
):
    target, _ = pair()
    sampling = SamplingParams(
        temperature=temperature, top_k=top_k, top_p=top_p, repetition_penalty=penalty
    )
    for rule in (Lossless(), Lenient("square", 0.5), Lossy(0.2, 0.9)):
        decoder = SpeculativeDecoder(target, target, rule, gamma=4, sampling=sampling)
        for generation in decoder.generate(PROMPTS, 30 + rule.exact, seed=5):
            assert generation.stats.acceptance_rate == 1.0
            assert generation.stats.draft_acceptance_rate == 1.0
            assert generation.stats.accepted_histogram == (0, 0, 0, 0, 6)
            assert generation.stats.block_efficiency == 5


# vllm#56724: drafted outside the target's top-k or top-p support
@pytest.mark.parametrize("sampling", [SamplingParams(top_k=2), SamplingParams(top_p=0.3)])
@pytest.mark.parametrize("rule", [Lossless(), Lenient("linear", 0.3), Lossy(0.5)])
def test_tokens_outside_the_targets_support_are_never_kept(sampling: SamplingParams, rule: Rule):
    likely = torch.tensor([0.3, 0.3, 0.1, 0.1, 0.1, 0.1])
    target = TableModel(likely.repeat(6, 1))
    draft = TableModel(likely.flip(0).repeat(6, 1))
    decoder = SpeculativeDecoder(target, draft, rule, gamma=3, sampling=sampling)
    for generation in decoder.generate([[0], [5]], 40):
        assert set(generation.tokens) <= {0, 1}
        assert generation.stats.num_accepted == 0
        # The last block has room for one token and drafts nothing; no prefill's token is drafted.
        recovered = 39 - generation.stats.num_prefill_tokens
        assert (generation.stats.num_recovered, generation.stats.num_bonus) == (recovered, 1)


def test_the_draft_proposes_within_its_own_support():
    # Both keep two tokens; they share token 1 alone, which the draft proposes half of the time.
    target = TableModel(torch.tensor([0.25, 0.25, 0.2, 0.15, 0.15]).repeat(5, 1))
    draft = TableModel(torch.tensor([0.1, 0.25, 0.25, 0.2, 0.2]).repeat(5, 1))
    decoder = SpeculativeDecoder(target, draft, gamma=1, sampling=SamplingParams(top_k=2))
    found = decoder.generate([[0]] * 20, 60)
    total = sum((generation.stats for generation in found), DecodeStats())
    assert 0.42 < total.acceptance_rate < 0.58  # 600 blocks: 4 deviations
    assert {token for generation in found for token in generation.tokens} == {0, 1}


@pytest.mark.parametrize("prompt", [[4], [3, 1]])
def test_a_rule_that_changes_the_text_makes_the_first_token_in_the_first_block(prompt: list[int]):
    target, draft = pair()
    decoder = SpeculativeDecoder(target, draft, Lenient("linear", 0.5), gamma=3)
    for seed in range(5):
        blocks = list(decoder.stream(prompt, 10, seed=seed))
        assert blocks[0].num_drafted == 3
        assert set(blocks[0].sources) <= {"accepted", "recovered", "bonus"}
        (generation,) = decoder.generate([prompt], 10, seed=seed)
        assert generation.stats.num_prefill_tokens == 0
        assert generation.stats.num_emitted == 10
    # one token alone is drafted and judged, too, and nothing follows it
    blocks = [block for seed in range(20) for block in decoder.stream(prompt, 1, seed=seed)]
    assert {(len(block.tokens), block.num_drafted) for block in blocks} == {(1, 1)}
    assert {block.sources[0] for block in blocks} <= {"accepted", "recovered"}


def test_a_first_token_may_end_the_text():
    target = TableModel(torch.eye(3).roll(1, 1), eos_token_ids=(1,))
    decoder = SpeculativeDecoder(target, target, Lossy(0.2), gamma=3)
    (generation,) = decoder.generate([[0]], 9)
    assert (generation.tokens, generation.stop_reason) == ([1], "eos")
    assert generation.stats == DecodeStats(
        *(1, 3, 1), accepted_histogram=(0, 1), num_accepted_behind_stop=2
    )


def test_a_block_names_the_drafted_tokens_that_are_not_in_the_text():
    """The draft counts up, the target stops at 3: by hand."""
    draft = TableModel(torch.eye(8).roll(1, 1))
    rows = torch.eye(8).roll(1, 1)
    rows[3] = torch.eye(8)[0]
    prefill, first, *_ = SpeculativeDecoder(TableModel(rows), draft, gamma=4).stream([0], 6)
    assert (prefill.rejected, first.tokens, first.rejected) == ((), (2, 3, 0), (4, 5))
    # tokens behind a stop token were not rejected
    ending = TableModel(rows, eos_token_ids=(2,))
    *_, last = SpeculativeDecoder(ending, draft, gamma=2).stream([0], 6)
    assert (last.tokens, last.num_drafted, last.rejected) == ((2,), 2, ())


# Hazard 2: after a block that was accepted whole the draft has not read its own last token.
@pytest.mark.parametrize("gamma", [1, 2, 4])
@pytest.mark.parametrize("same", [True, False])
def test_between_blocks_both_sessions_hold_the_text_less_its_newest_tokens(
    gamma: int, *, same: bool
):
    plain_target, plain_draft = pair()
    target = Watched(plain_target._log_probs.exp())
    draft = Watched((plain_target if same else plain_draft)._log_probs.exp())
    text = [3, 1]
    blocks = SpeculativeDecoder(target, draft, gamma=gamma).stream(text, 40, seed=1)
    for number, block in enumerate(blocks):
        text += block.tokens
        assert target.session.rows == [text[:-1]]
        if block.num_drafted or number == 0:
            unread = 2 if block.sources[-1] == "bonus" else 1
            assert draft.session.rows == [text[:-unread]]


def test_no_rule_counts_the_pass_over_the_prompt():
    """Three tokens of a certain target, one of which is drafted per block.

    lossless    the prompt's pass gives 1 | block: 2 accepted, 0 added        1 call for 2 tokens
    lossy 0     the prompt's pass gives no token | 1 accepted, 2 added | 0    2 calls for 3 tokens
    """
    counts = {}
    for rule in (Lossless(), Lossy(0.0)):
        target, draft = (TableModel(torch.eye(3).roll(1, 1)) for _ in range(2))
        decoder = SpeculativeDecoder(target, draft, rule, gamma=1)
        (generation,) = decoder.generate([[0]], 3, eos_token_ids=[])
        stats = generation.stats
        assert generation.tokens == [1, 2, 0]
        assert target.num_passes == 1 + stats.num_target_calls
        counts[rule.rule] = stats.num_prefill_tokens, stats.num_target_calls, stats.num_emitted
    assert counts == {"lossless": (1, 1, 2), "lossy": (0, 2, 3)}


@pytest.mark.parametrize("gamma", [1, 3, 6])
def test_every_block_costs_one_target_pass_and_one_draft_pass_a_drafted_token(gamma: int):
    target, draft = pair()
    decoder = SpeculativeDecoder(target, draft, gamma=gamma)
    (generation,) = decoder.generate([[1, 2]], 45, seed=2)
    assert target.num_passes == generation.stats.num_target_calls + 1
    assert draft.num_passes == generation.stats.num_drafted + 1
    assert generation.stats.num_target_calls < 44


# vllm#18541: bonus tokens over-counted
@pytest.mark.parametrize("gamma", [1, 4])
@pytest.mark.parametrize("rule", [Lossless(), Lenient("exponential", 0.3), TokenV3(0.5)])
def test_counts_by_source_are_the_tokens_of_the_text(gamma: int, rule: Rule):
    target, draft = pair(eos_token_ids=(7,))
    bonus: Bonus = "target" if isinstance(rule, TokenV3) else "rule"
    decoder = SpeculativeDecoder(target, draft, rule, gamma=gamma, bonus=bonus)
    for seed, prompt in itertools.product(range(6), PROMPTS):
        blocks = list(decoder.stream(prompt, 25, seed=seed))
        (generation,) = decoder.generate([prompt], 25, seed=seed)
        check_counts(generation, gamma, None if bonus == "target" else rule)
        assert [token for block in blocks for token in block.tokens] == generation.tokens
        sources = [source for block in blocks for source in block.sources]
        stats = generation.stats
        assert sources.count("prefill") == stats.num_prefill_tokens
        assert sources.count("accepted") == stats.num_accepted
        assert sources.count("recovered") == stats.num_recovered
        assert sources.count("bonus") == stats.num_bonus
        assert sum(block.num_drafted for block in blocks) == stats.num_drafted
        assert len(blocks) == stats.num_blocks + stats.num_prefill_tokens


# Soup#345: the penalty must see what the block itself drafted, on both sides.
def test_the_penalty_follows_every_drafted_token():
    """Uniform tables: after each token the penalty alone decides, so no token comes twice."""
    uniform = TableModel(torch.full((9, 9), 1 / 9))
    sampling = SamplingParams(temperature=0, repetition_penalty=1.5)
    (generation,) = SpeculativeDecoder(uniform, uniform, gamma=3, sampling=sampling).generate(
        [[4]], 8
    )
    assert generation.tokens == [0, 1, 2, 3, 5, 6, 7, 8]
    assert generation.stats.acceptance_rate == 1.0


@pytest.mark.parametrize(("bonus", "more"), [("rule", 1), ("target", 0)])
def test_the_draft_makes_no_pass_behind_its_last_token(
    bonus: Bonus, more: int, monkeypatch: pytest.MonkeyPatch
):
    drawn = Mock(wraps=speculative.draw)
    monkeypatch.setattr(speculative, "draw", drawn)
    target, draft = pair()
    decoder = SpeculativeDecoder(target, draft, Chow(0.52), 2, bonus=bonus)
    decoder.generate(PROMPTS[1:2], 13, eos_token_ids=[])
    plans = [call.args[1].plan for call in drawn.call_args_list]
    assert [plan.num_passes - plan.num_tokens for plan in plans] == [more] * len(plans)
