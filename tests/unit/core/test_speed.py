"""The speed model against published figures, brute force and exact enumeration of blocks."""

import math
from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.core.speed import (
    accepted_by_position,
    block_efficiency_iid,
    break_even_acceptance,
    drafted_tokens,
    examined_places,
    mbsu,
    predicted_speedup,
    tokens_and_blocks,
)

# A chain of three tokens in quarters, so that every text of T tokens is one of 4^T equal draws.
# After token 0 the draft is nearly right, after 1 half wrong, after 2 quite wrong: easy and hard
# stretches cluster.
TARGET = torch.tensor([[0.75, 0.25, 0], [0.25, 0.5, 0.25], [0, 0.25, 0.75]], dtype=torch.float64)
DRAFT = torch.tensor([[0.75, 0.2, 0.05], [0.5, 0.3, 0.2], [0.6, 0.3, 0.1]], dtype=torch.float64)


@pytest.mark.parametrize(
    ("acceptance", "gamma"), [(0.5, 1), (0.8, 3), (0.95, 7), (0.3, 0), (0.0, 5), (1.0, 5)]
)
def test_iid_block_efficiency_is_the_closed_form(acceptance: float, gamma: int):
    closed = 6 if acceptance == 1 else (1 - acceptance ** (gamma + 1)) / (1 - acceptance)
    assert block_efficiency_iid(acceptance, gamma) == pytest.approx(closed, rel=1e-14)


def test_the_published_example_gives_a_memory_bound_speedup_of_2_19():
    # Goel et al.: tau 2.3 at gamma 3, c 0.0164
    assert mbsu(2.3, 3, 0.0164) == pytest.approx(2.19, abs=0.005)


def test_predicted_speedup_by_hand():
    assert predicted_speedup(3.0, 4, 0.25) == 1.5
    assert predicted_speedup(3.0, 4, 0.25, block_cost_ratio=2.0) == 1.0
    assert predicted_speedup(1.0, 0, 0.7) == 1.0


# Soup#843: draft 1.68 times as fast as its target, gamma 5: break-even .832. At the measured
# acceptance of .813 that pair loses with gamma 5, and gains with 1 and 2.
def test_the_pair_of_that_report_loses_at_gamma_5_and_gains_at_1_and_2():
    assert break_even_acceptance(5, 1 / 1.68) == pytest.approx(0.832, abs=5e-4)
    assert predicted_speedup(block_efficiency_iid(0.813, 5), 5, 1 / 1.68) < 1
    for gamma in (1, 2):
        assert predicted_speedup(block_efficiency_iid(0.813, gamma), gamma, 1 / 1.68) > 1


@pytest.mark.parametrize("gamma", [1, 2, 5, 9])
@pytest.mark.parametrize(("cost", "block_cost"), [(0.05, 1.0), (0.4, 1.0), (0.2, 1.3), (0.99, 1.0)])
def test_at_break_even_the_predicted_speedup_is_one(gamma: int, cost: float, block_cost: float):
    acceptance = break_even_acceptance(gamma, cost, block_cost)
    assert 0 < acceptance < 1
    tau = block_efficiency_iid(acceptance, gamma)
    assert predicted_speedup(tau, gamma, cost, block_cost) == pytest.approx(1, abs=1e-12)


def test_break_even_at_its_ends():
    assert break_even_acceptance(5, 0.0) == 0
    assert break_even_acceptance(0, 0.5) == 0
    assert break_even_acceptance(3, 1.0) == math.inf
    assert break_even_acceptance(3, 2.0) == math.inf
    assert break_even_acceptance(2, 0.5, block_cost_ratio=2.0) == math.inf


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: block_efficiency_iid(1.1, 3), r"in \[0, 1\], got 1.1"),
        (lambda: block_efficiency_iid(0.5, -1), "0 or more, got -1"),
        (lambda: predicted_speedup(2.0, 3, -0.1), "0 or more, got -0.1"),
        (lambda: break_even_acceptance(3, math.nan), "0 or more, got nan"),
        (lambda: block_efficiency_iid(math.nan, 3), r"in \[0, 1\], got nan"),
    ],
)
def test_numbers_that_cannot_be_are_refused(call: Callable[[], object], said: str):
    with pytest.raises(ValueError, match=said):
        call()


MASKED = torch.tensor([[0.5, 0.25, 0.25], [0.2, 0.2, 0.6], [0.1, 0.8, 0.1]], dtype=torch.float64)
END = 2


@cache
def all_texts(budget: int, end: int | None) -> tuple[Tensor, Tensor]:
    """Every equally likely text of the target after token 0, [4^budget, budget], and its mask."""
    quarters = (TARGET * 4).long()
    draws = [
        [v for v in range(3) for _ in range(int(quarters[context, v]))] for context in range(3)
    ]
    texts: list[list[int]] = []
    masks: list[list[int]] = []
    for picks in product(range(4), repeat=budget):
        text, mask = [0], list[int]()
        for pick in picks:
            mask.append(int(text[-1] != end))
            text.append(draws[text[-1]][pick] if mask[-1] else text[-1])
        texts.append(text[1:])
        masks.append(mask)
    return torch.tensor(texts), torch.tensor(masks)


def scores(texts_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Acceptance and survival at every position of texts that follow token 0."""
    contexts_BT = torch.cat([torch.zeros_like(texts_BT[:, :1]), texts_BT[:, :-1]], 1)
    acceptance = torch.minimum(TARGET, DRAFT).sum(-1)[contexts_BT]
    survival = (DRAFT / TARGET).clamp(max=1)[contexts_BT, texts_BT]
    return acceptance, survival


def proposals(context: int, place: int, last: int, *, parallel: bool) -> list[float]:
    """q at a place of a block behind `context`; `last`: the token before, which masks hide."""
    rows = MASKED if parallel and place else DRAFT
    return rows[(context + place) % 3 if parallel else last].tolist()


def scores_by_place(texts_BT: Tensor, gamma: int) -> tuple[Tensor, Tensor]:
    """Acceptance and survival of the parallel draft, by the start of a block and the place."""
    batch, length = texts_BT.shape
    acceptance, survival = torch.zeros(2, batch, length, gamma, dtype=torch.float64)
    for row, text in enumerate(texts_BT.tolist()):
        for start in range(length):
            for place in range(min(gamma, length - start)):
                before = [0, *text]
                p = TARGET[before[start + place]].tolist()
                q = proposals(before[start], place, 0, parallel=True)
                token = text[start + place]
                acceptance[row, start, place] = sum(map(min, p, q))
                survival[row, start, place] = min(1.0, q[token] / p[token])
    return acceptance, survival


@cache
def engine(
    budget: int, gamma: int, end: int | None, *, parallel: bool = False
) -> tuple[float, float, float, list[float]]:
    """Expected tokens, blocks and drafted tokens of an engine's text after token 0.

    Last, of gamma numbers: the expected blocks whose first, second, ... draft stays.

    Every draft of up to gamma tokens, every number of accepted ones, every recovered or bonus
    token, from the first token to the end of text or of the budget.
    """
    starts = [dict.fromkeys(range(3), 0.0) for _ in range(budget + 1)]
    starts[0][0] = 1.0
    tokens = blocks = num_drafted = 0.0
    kept = [0.0] * gamma
    for place in range(budget):
        for context, mass in starts[place].items():
            count = min(gamma, budget - place - 1)
            blocks += mass
            num_drafted += mass * count
            for drafted in product(range(3), repeat=count):
                proposed = math.prod(
                    proposals(context, number, last, parallel=parallel)[token]
                    for number, (last, token) in enumerate(
                        zip((context, *drafted), drafted, strict=False)
                    )
                )
                for emitted, chance in outcomes(context, drafted, end, parallel=parallel):
                    tokens += mass * proposed * chance * len(emitted)
                    # a recovered token is never the drafted one
                    same = [a == b for a, b in zip(emitted, drafted, strict=False)]
                    stays = same.index(False) if False in same else len(same)
                    for position in range(stays):
                        kept[position] += mass * proposed * chance
                    if emitted[-1] != end:
                        starts[place + len(emitted)][emitted[-1]] += mass * proposed * chance
    return tokens, blocks, num_drafted, kept


def outcomes(context: int, drafted: tuple[int, ...], end: int | None, *, parallel: bool):
    """What a block may emit for this draft, with its probability."""
    p = TARGET.tolist()
    kept, last = 1.0, context
    for count, token in enumerate(drafted):
        q = proposals(context, count, last, parallel=parallel)
        if q[token] == 0:
            return
        accept = min(1.0, p[last][token] / q[token])
        excess = [max(0.0, a - b) for a, b in zip(p[last], q, strict=True)]
        if accept < 1:
            for other, weight in enumerate(excess):
                yield (*drafted[:count], other), kept * (1 - accept) * weight / sum(excess)
        kept, last = kept * accept, token
        if token == end:
            yield drafted[: count + 1], kept
            return
    for bonus in range(3):
        yield (*drafted, bonus), kept * p[last][bonus]


ends = pytest.mark.parametrize("end", [None, END])


def tau_of_text(*scores_and_gamma: Any, budget: int | Tensor | None = None) -> float:
    tokens, blocks = tokens_and_blocks(*scores_and_gamma, budget=budget)
    return float(tokens.sum() / blocks.sum())


@ends
@pytest.mark.parametrize("gamma", [0, 1, 2, 3, 9])
@pytest.mark.parametrize("budget", [1, 2, 4, 6])
def test_efficiency_from_text_is_what_enumerating_an_engine_gives(
    budget: int, gamma: int, end: int | None
):
    tokens, blocks, drafted, by_position = engine(budget, gamma, end)
    texts, mask = all_texts(budget, end)
    tau = tau_of_text(*scores(texts), mask, gamma, budget=budget)
    assert tau == pytest.approx(tokens / blocks, abs=1e-12)
    found_tokens, found_blocks = tokens_and_blocks(*scores(texts), mask, gamma)
    assert float(found_tokens.mean()) == pytest.approx(tokens, abs=1e-12)
    assert float(found_blocks.mean()) == pytest.approx(blocks, abs=1e-12)
    drafted_B = drafted_tokens(scores(texts)[1], mask, gamma)
    assert float(drafted_B.mean()) == pytest.approx(drafted, abs=1e-12)
    if gamma:
        found_BG, blocks_B = accepted_by_position(*scores(texts), mask, gamma)
        assert found_BG.mean(0).tolist() == pytest.approx(by_position, abs=1e-12)
        assert float(blocks_B.mean()) == pytest.approx(blocks, abs=1e-12)


@ends
@pytest.mark.parametrize("gamma", [1, 2, 3])
def test_places_of_a_parallel_draft_are_what_enumerating_an_engine_gives(
    gamma: int, end: int | None
):
    """The mutant takes the scores of each position for those of every place there."""
    tokens, blocks, drafted, by_position = engine(4, gamma, end, parallel=True)
    texts, mask = all_texts(4, end)
    places = scores_by_place(texts, gamma)
    found_tokens, found_blocks = tokens_and_blocks(*places, mask, gamma)
    assert float(found_tokens.mean()) == pytest.approx(tokens, abs=1e-12)
    assert float(found_blocks.mean()) == pytest.approx(blocks, abs=1e-12)
    assert float(drafted_tokens(places[1], mask, gamma).mean()) == pytest.approx(drafted, abs=1e-12)
    found_BG, _ = accepted_by_position(*places, mask, gamma)
    assert found_BG.mean(0).tolist() == pytest.approx(by_position, abs=1e-12)
    _, mutant = tokens_and_blocks(*(part[..., 0] for part in places), mask, gamma)
    assert gamma == 1 or abs(float(mutant.mean()) - blocks) > 1e-3


def test_blocks_that_start_behind_a_place_can_be_left_out():
    """Of ten rejected positions, each a block of its own, the first seven count."""
    none = torch.zeros(1, 10)
    kept, blocks = accepted_by_position(
        none, none, torch.ones(1, 10), 2, starts_before=torch.tensor([7])
    )
    assert (kept.tolist(), blocks.tolist()) == ([[0.0, 0.0]], [7.0])


def test_an_accepted_end_of_text_has_no_bonus_behind_it():
    # 11 tokens, the last one ends the text; the budget would allow 40. Blocks of 10 + 1, and of
    # 11 where gamma is 11 or more.
    ones = torch.ones(1, 11)
    for gamma in (10, 11, 20):
        assert tau_of_text(ones, ones, ones, gamma, budget=40) == 11
    assert tau_of_text(ones, ones, ones, 5, budget=40) == pytest.approx(11 / 2)
    assert drafted_tokens(ones, ones, 20, budget=40).tolist() == [20]
    assert drafted_tokens(ones, ones, 20).tolist() == [10]


def test_each_text_may_have_a_budget_of_its_own():
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 0]])
    half = 0.5 * mask
    # cut at 3: the last token is never judged. Ended at 3: it is, and may be an accepted draft.
    tokens, blocks = tokens_and_blocks(half, half, mask, 1, budget=torch.tensor([3, 9]))
    # P(a block starts): at 0 1, at 1 0.5, at 2 0.5 + 0.5 x 0.5
    assert blocks.tolist() == [2.25, 2.25]
    assert tokens.tolist() == [2.25 + 0.5 * 1.5, 2.25 + 0.5 * 2.25 - 0.5 * 0.75]


def test_what_is_masked_does_not_count():
    acceptance = torch.tensor([[0.5, 0.5, 0.5, 9.0], [0.5, 9.0, 9.0, 9.0]])
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]])
    budget = torch.tensor([3, 1])
    found = tau_of_text(acceptance, acceptance, mask, 2, budget=budget)
    # text 1: starts at 0 (1), 1 (0.5) and 2 (0.5 x 0.5 + 0.5 x 0.5); judged at 0 (1) and 1 (1)
    assert found == pytest.approx((2 + 2 * 0.5 + 1) / (2 + 1))


def test_texts_without_a_token_are_an_error():
    nothing = torch.zeros(2, 3)
    with pytest.raises(ValueError, match="no text has a token"):
        tokens_and_blocks(nothing, nothing, nothing, 4)
    with pytest.raises(ValueError, match="no text has a token"):
        drafted_tokens(nothing, nothing, 4)


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
    found = examined_places(torch.tensor(rows), torch.ones(2, 7), gamma, budget=8)
    assert torch.allclose(found, torch.tensor([walked(r, gamma) for r in rows]).double(), atol=1e-6)
