"""Named random streams."""

from typing import Any

import torch

from paceline.rng import named_generator


def first_numbers(seed: int, *names: str | int) -> list[float]:
    return torch.rand(4, generator=named_generator(seed, *names)).tolist()


# vllm#47386: the streams for drafting, accepting and recovering must not be one.
def test_every_seed_and_every_name_has_numbers_of_its_own():
    keys: list[Any] = [
        (seed, name) for seed in range(-3, 200) for name in ("draft", "accept", "choose")
    ]
    # names are told apart by type, order and grouping
    keys += [(0, *names) for names in (("1",), (1,), ("a", "b"), ("b", "a"), ("ab",), ("a",))]
    keys += [(0,), (0, 1, 2), (0, 12)]
    assert len({tuple(first_numbers(*key)) for key in keys}) == len(keys)


def test_neighbouring_seeds_do_not_give_shifted_or_correlated_numbers():
    """1,000 seeds, 8 numbers each: the largest of 28 correlations stays within 4.5 / sqrt(1000).

    Under independence one exceeds that with odds of about 1 in 5,000.
    """
    numbers = torch.stack([torch.rand(8, generator=named_generator(s, "x")) for s in range(1001)])
    pairs = torch.cat([numbers[:-1, :4], numbers[1:, :4]], 1)
    correlations = torch.corrcoef(pairs.T).fill_diagonal_(0)
    assert float(correlations.abs().max()) < 4.5 / 1000**0.5


def test_the_global_stream_is_neither_read_nor_moved():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first_numbers(1, "a")
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    assert first_numbers(1, "a") == first_numbers(1, "a")
    other = first_numbers(1, "a")
    torch.manual_seed(7)
    assert first_numbers(1, "a") == other


def test_the_seed_is_the_digest_of_seed_and_names():
    """A change here changes every seeded text that users have kept."""
    # printf '0\\x1fstr:draft' | sha256sum: the first 16 digits, halved
    digest = 0x2CE09B9E83B7E9A4
    expected = torch.rand(4, generator=torch.Generator().manual_seed(digest >> 1))
    assert first_numbers(0, "draft") == expected.tolist()
