"""Counts add; rates follow from them."""

import math
from functools import reduce
from operator import add

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.stats import DecodeStats

# Three blocks of gamma 4: all accepted and a bonus; 1 accepted and a recovered; 0 and a recovered.
THREE_BLOCKS = DecodeStats(
    num_blocks=3,
    num_drafted=12,
    num_accepted=5,
    num_recovered=2,
    num_bonus=1,
    num_prefill_tokens=1,
    accepted_histogram=(1, 1, 0, 0, 1),
)

counts = st.integers(0, 50)
stats = st.builds(
    DecodeStats,
    num_blocks=counts,
    num_drafted=counts,
    num_accepted=counts,
    num_recovered=counts,
    num_bonus=counts,
    num_prefill_tokens=counts,
    accepted_histogram=st.lists(counts, max_size=6).map(tuple),
)


def test_rates_of_three_blocks_by_hand():
    assert THREE_BLOCKS.num_target_calls == 3
    assert THREE_BLOCKS.num_emitted == 8
    assert THREE_BLOCKS.num_examined == 7
    assert THREE_BLOCKS.acceptance_rate == 5 / 7
    assert THREE_BLOCKS.draft_acceptance_rate == 5 / 12
    assert THREE_BLOCKS.block_efficiency == 8 / 3


# vllm#18541: counting gamma + 1 tokens for a block that had no bonus gave 6.6 instead of 5.6.
def test_a_block_gives_at_most_one_token_more_than_it_drafted():
    full = DecodeStats(num_blocks=10, num_drafted=50, num_accepted=50, num_bonus=10)
    assert full.block_efficiency == 6
    rejected = DecodeStats(num_blocks=10, num_drafted=50, num_accepted=46, num_recovered=10)
    assert rejected.block_efficiency == 5.6


def test_rates_of_a_sum_are_ratios_of_sums_and_not_means_of_rates():
    many = DecodeStats(num_blocks=100, num_drafted=100, num_accepted=100, num_bonus=100)
    total = THREE_BLOCKS + many
    assert total.acceptance_rate == 105 / 107
    assert total.block_efficiency == 208 / 103


@settings(deadline=None, derandomize=True)
@given(st.lists(stats, min_size=1, max_size=5))
def test_the_order_of_adding_does_not_matter_and_nothing_changes_nothing(parts: list[DecodeStats]):
    total = reduce(add, parts)
    assert total == reduce(add, reversed(parts)) == total + DecodeStats()
    assert total.num_drafted == sum(part.num_drafted for part in parts)
    longest = max(len(part.accepted_histogram) for part in parts)
    padded = [(*part.accepted_histogram, *[0] * longest)[:longest] for part in parts]
    assert total.accepted_histogram == tuple(map(sum, zip(*padded, strict=True)))


@pytest.mark.parametrize("rate", ["acceptance_rate", "draft_acceptance_rate", "block_efficiency"])
def test_a_rate_of_nothing_is_not_a_number(rate: str):
    assert math.isnan(getattr(DecodeStats(), rate))
