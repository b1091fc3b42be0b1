"""The speed model against published figures, brute force and exact enumeration of blocks."""

import math
from itertools import product

import pytest
import torch
from torch import Tensor

from paceline.core.speed import (
    best_gamma,
    block_efficiency_from_text,
    block_efficiency_iid,
    break_even_acceptance,
    examined_places,
    mbsu,
    predicted_speedup,
)

# A chain of three tokens in quarters, so that every text of T tokens is one of 4^T equal draws.
# After token 0 the draft is nearly right, after 1 half wrong, after 2 quite wrong: easy and hard
# stretches cluster.
TARGET = torch.tensor([[0.75, 0.25, 0], [0.25, 0.5, 0.25], [0, 0.25, 0.75]], dtype=torch.float64)
DRAFT = torch.tensor([[0.75, 0.2, 0.05], [0.5, 0.3, 0.2], [0.6, 0.3, 0.1]], dtype=torch.float64)


@pytest.mark.parametrize(("acceptance", "gamma"), [(0.5, 1), (0.8, 3), (0.95, 7), (0.3, 0)])
def test_iid_block_efficiency_is_the_closed_form(acceptance: float, gamma: int):
    closed = (1 - acceptance ** (gamma + 1)) / (1 - acceptance)
    assert block_efficiency_iid(acceptance, gamma) == pytest.approx(closed, rel=1e-14)


def test_iid_block_efficiency_at_its_ends():
    assert block_efficiency_iid(0.0, 5) == 1
    assert block_efficiency_iid(1.0, 5) == 6


def test_the_published_example_gives_a_memory_bound_speedup_of_2_19():
    # Goel et al.: tau 2.3 at gamma 3, c 0.0164
    assert mbsu(2.3, 3, 0.0164) == pytest.approx(2.19, abs=0.005)


def test_predicted_speedup_by_hand():
    assert predicted_speedup(3.0, 4, 0.25) == 1.5
    assert predicted_speedup(3.0, 4, 0.25, block_cost_ratio=2.0) == 1.0
    assert predicted_speedup(1.0, 0, 0.7) == 1.0


# Soup#843: draft 1.68 times as fast as its target, gamma 5: break-even .832.
def test_break_even_of_a_draft_that_is_only_1_68_times_as_fast():
    assert break_even_acceptance(5, 1 / 1.68) == pytest.approx(0.832, abs=5e-4)


# Soup#843: at the measured acceptance of .813 that pair loses with gamma 5; 1 or 2 are best.
def test_the_pair_of_that_report_loses_at_gamma_5_and_is_best_at_1_or_2():
    loss = predicted_speedup(block_efficiency_iid(0.813, 5), 5, 1 / 1.68)
    assert loss < 1
    assert best_gamma(0.813, 1 / 1.68) in (1, 2)


@pytest.mark.parametrize("gamma", [1, 2, 5, 9])
@pytest.mark.parametrize(("cost", "block_cost"), [(0.05, 1.0), (0.4, 1.0), (0.2, 1.3), (0.99, 1.0)])
def test_at_break_even_the_predicted_speedup_is_one(gamma: int, cost: float, block_cost: float):
    acceptance = break_even_acceptance(gamma, cost, block_cost)
    assert 0 < acceptance < 1
    tau = block_efficiency_iid(acceptance, gamma)
    assert predicted_speedup(tau, gamma, cost, block_cost) == pytest.approx(1, abs=1e-12)


def test_break_even_at_gamma_one_is_the_cost_ratio():
    assert break_even_acceptance(1, 0.37) == pytest.approx(0.37, abs=1e-12)


def test_break_even_at_its_ends():
    assert break_even_acceptance(5, 0.0) == 0
    assert break_even_acceptance(0, 0.5) == 0
    assert break_even_acceptance(3, 1.0) == math.inf
    assert break_even_acceptance(3, 2.0) == math.inf
    assert break_even_acceptance(2, 0.5, block_cost_ratio=2.0) == math.inf


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.6, 0.813, 0.95, 1.0])
@pytest.mark.parametrize("cost", [0.01, 0.1, 0.3, 0.6, 0.95, 1.5])
def test_best_gamma_is_the_one_that_brute_force_finds(acceptance: float, cost: float):
    best, fastest = 0, 1.0
    for gamma in range(1, 13):
        tau = sum(acceptance**i for i in range(gamma + 1))
        if tau / (cost * gamma + 1) > fastest:
            best, fastest = gamma, tau / (cost * gamma + 1)
    assert best_gamma(acceptance, cost, max_gamma=12) == best


def test_a_useless_draft_has_best_gamma_zero_and_a_perfect_cheap_one_the_largest():
    assert best_gamma(0.0, 0.1) == 0
    assert best_gamma(1.0, 0.1, max_gamma=9) == 9


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: block_efficiency_iid(1.1, 3), "acceptance must be in [0, 1], got 1.1"),
        (lambda: block_efficiency_iid(0.5, -1), "gamma must be 0 or more, got -1"),
        (lambda: predicted_speedup(2.0, 3, -0.1), "cost ratio must be 0 or more, got -0.1"),
        (lambda: break_even_acceptance(3, math.nan), "cost ratio must be 0 or more, got nan"),
        (lambda: best_gamma(math.nan, 0.1), "acceptance must be in [0, 1], got nan"),
    ],
)
def test_numbers_that_cannot_be_are_refused_in_one_line(call, said: str):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the text is compared below
        call()
    assert str(caught.value) == said


def all_texts(length: int) -> Tensor:
    """Every equally likely text of the target after token 0, [4^length, length]."""
    quarters = (TARGET * 4).long()
    draws = [
        [v for v in range(3) for _ in range(int(quarters[context, v]))] for context in range(3)
    ]
    texts: list[list[int]] = []
    for picks in product(range(4), repeat=length):
        text = [0]
        for pick in picks:
            text.append(draws[text[-1]][pick])
        texts.append(text[1:])
    return torch.tensor(texts)


def scores(texts_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Acceptance and survival at every position of texts that follow token 0."""
    contexts_BT = torch.cat([torch.zeros_like(texts_BT[:, :1]), texts_BT[:, :-1]], 1)
    acceptance = torch.minimum(TARGET, DRAFT).sum(-1)[contexts_BT]
    survival = (DRAFT / TARGET).clamp(max=1)[contexts_BT, texts_BT]
    return acceptance, survival


def enumerated_efficiency(length: int, gamma: int) -> float:
    """Tokens over blocks of real blocks, started up to position length - gamma.

    Every draft of gamma tokens, every number of accepted ones, every recovered or bonus token.
    """
    p, q = TARGET.tolist(), DRAFT.tolist()
    starts = [dict.fromkeys(range(3), 0.0) for _ in range(length + gamma + 2)]
    starts[0][0] = 1.0
    tokens = blocks = 0.0
    for start in range(length - gamma + 1):
        for context, mass in starts[start].items():
            blocks += mass
            for drafted in product(range(3), repeat=gamma):
                reach, last = mass, context
                for count, token in enumerate(drafted):
                    drawn = reach * q[last][token]
                    kept = reach * min(p[last][token], q[last][token])
                    excess = [max(0.0, a - b) for a, b in zip(p[last], q[last], strict=True)]
                    # The draft goes on behind a rejected token; its drafts are summed out.
                    later = math.prod(
                        q[a][b] for a, b in zip(drafted[count:], drafted[count + 1 :], strict=False)
                    )
                    for recovered, weight in enumerate(excess):
                        share = (drawn - kept) * later * weight / sum(excess)
                        starts[start + count + 1][recovered] += share
                        tokens += share * (count + 1)
                    reach, last = kept, token
                for bonus in range(3):
                    starts[start + gamma + 1][bonus] += reach * p[last][bonus]
                tokens += reach * (gamma + 1)
    return tokens / blocks


@pytest.mark.parametrize("gamma", [1, 2, 3])
def test_efficiency_from_text_is_what_enumerating_every_block_gives(gamma: int):
    texts = all_texts(6)
    acceptance, survival = scores(texts)
    found = block_efficiency_from_text(acceptance, survival, torch.ones_like(texts), gamma)
    assert found == pytest.approx(enumerated_efficiency(6, gamma), abs=1e-12)


def test_efficiency_of_one_block_is_one_plus_the_chances_of_longer_and_longer_prefixes():
    # Only the start at 0 has three tokens left: 1 + sum over drafts of prod min(p, q).
    texts = all_texts(3)
    acceptance, survival = scores(texts)
    overlap = torch.minimum(TARGET, DRAFT).tolist()
    chances = 0.0
    for size in (1, 2, 3):
        for draft in product(range(3), repeat=size):
            path = (0, *draft)
            chances += math.prod(overlap[a][b] for a, b in zip(path, draft, strict=False))
    found = block_efficiency_from_text(acceptance, survival, torch.ones_like(texts), 3)
    assert found == pytest.approx(1 + chances, abs=1e-12)


def test_constant_acceptance_gives_the_iid_figure():
    constant = torch.full((4, 40), 0.6)
    found = block_efficiency_from_text(constant, constant, torch.ones(4, 40), 5)
    assert found == pytest.approx(block_efficiency_iid(0.6, 5), abs=1e-6)


def test_a_hard_stretch_counts_by_its_blocks_and_not_by_its_tokens():
    # 10 tokens kept in blocks of 4 + bonus, then 10 that are all rejected. Starts up to 16 count:
    # 0 and 5 with 5 tokens each, 10 to 16 with one each.
    kept = torch.cat([torch.ones(1, 10), torch.zeros(1, 10)], 1)
    found = block_efficiency_from_text(kept, kept, torch.ones(1, 20), 4)
    assert found == pytest.approx((2 * 5 + 7) / 9)


def test_what_is_masked_and_texts_shorter_than_a_block_do_not_count():
    acceptance = torch.tensor([[0.5, 0.5, 0.5, 9.0], [0.5, 9.0, 9.0, 9.0]])
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]])
    found = block_efficiency_from_text(acceptance, acceptance.clamp(max=0.5), mask, 2)
    assert found == pytest.approx(1.75)


def test_without_a_draft_a_block_gives_one_token():
    assert block_efficiency_from_text(torch.ones(1, 3), torch.ones(1, 3), torch.ones(1, 3), 0) == 1


@pytest.mark.parametrize(
    "mask", [torch.ones(2, 3), torch.tensor([[1, 1, 1, 0, 0], [1, 0, 0, 0, 0]])]
)
def test_texts_that_are_all_shorter_than_a_block_are_an_error(mask: Tensor):
    ones = torch.ones(mask.shape)
    with pytest.raises(ValueError, match="no text has 4 tokens; use a smaller gamma"):
        block_efficiency_from_text(ones, ones, mask, 4)


def walked(survival: list[float], gamma: int) -> list[float]:
    """P(judged) of each place, by walking through every way that the blocks may fall."""
    judged = [0.0] * len(survival)

    def walk(start: int, chance: float) -> None:
        for offset in range(gamma):
            place = start + offset
            if place >= len(survival):
                return
            judged[place] += chance
            walk(place + 1, chance * (1 - survival[place]))  # rejected, recovered
            chance *= survival[place]
        walk(start + gamma + 1, chance)  # behind the bonus

    walk(0, 1.0)
    return judged


@pytest.mark.parametrize("gamma", [1, 2, 3, 9])
def test_places_that_are_judged_are_those_of_all_ways_the_blocks_may_fall(gamma: int):
    rows = [[0.3, 1.0, 0.0, 0.6, 0.9, 0.2, 0.5], [0.8, 0.1, 0.7, 0.0, 0.0, 0.0, 0.0]]
    found = examined_places(torch.tensor(rows), gamma)
    assert torch.allclose(found, torch.tensor([walked(r, gamma) for r in rows]).double(), atol=1e-6)
