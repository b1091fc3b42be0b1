"""How often a simulated engine is said to agree with the prediction, or to differ from it.

The engine counts as vLLM does: three drafted tokens per block, 63 positions per request, and the
last block drafts beyond the end. The draft is good at some requests and positions, and bad at
others. An engine that is off accepts too little at every position, or too little at the first and
too much at the others. Given the text, a drafted token is accepted with its survival, whose mean is
the acceptance; the prediction knows both. Rates of n runs are binomial: limits of 5% are checked
with three standard deviations of the simulation.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from paceline.core.bootstrap import Interval, ratio_interval
from paceline.engines.vllm import VllmServer
from paceline.measure import agreement
from paceline.measure.acceptance import TextScores
from paceline.measure.agreement import Agreement, Counts, decide_agreement, predicted_counts

GAMMA, LENGTH = 3, 63
RUNS = {8: 150, 16: 100, 64: 60}
# tokens per call / predicted -> part of the acceptance that the engine keeps, by position
KEEPS = {1.0: (1.0,) * GAMMA, 0.95: (0.9408,) * GAMMA, 0.9: (0.8775,) * GAMMA}
# 0.06 less at the first position, 0.015 and 0.04 more at the others; tokens per call as predicted
BY_POSITION = (0.9, 1.2324, 1.2324)


Pair = tuple[Tensor, Tensor]


class Simulated(NamedTuple):
    served: Counts
    predicted: Counts


def simulated(count: int, keeps: tuple[float, ...], seed: int) -> Simulated:
    """Counts of this many requests."""
    rng = torch.Generator().manual_seed(seed)
    width = 1 + LENGTH + GAMMA  # the first token comes with the prompt; the engine drafts on
    normal_B1 = 0.5 * torch.randn(count, 1, generator=rng, dtype=torch.float64)
    noise_BT = torch.randn(count, width, generator=rng, dtype=torch.float64)
    alpha_BT = (0.5 + normal_B1 + 1.2 * noise_BT).sigmoid()
    # survival: all, nothing, or something in between, with mean alpha
    uniform_BT = torch.rand(count, width, generator=rng, dtype=torch.float64)
    all_BT = (torch.rand(count, width, generator=rng, dtype=torch.float64) < alpha_BT).double()
    survival_BT = torch.where(uniform_BT < 0.5, all_BT, alpha_BT)
    served = walked(survival_BT[:, 1:], keeps, rng)
    inside = slice(0, 1 + LENGTH)
    mask_BT = torch.ones(count, 1 + LENGTH, dtype=torch.bool)
    empty_BT = torch.zeros(count, 1 + LENGTH)
    scores = TextScores(alpha_BT[:, inside], survival_BT[:, inside], empty_BT, empty_BT, mask_BT)
    return Simulated(served, predicted_counts(scores, GAMMA, 1 + LENGTH, VllmServer))


def walked(survival_BT: Tensor, keeps: tuple[float, ...], rng: torch.Generator) -> Counts:
    """Block by block, each token as the engine's coins fall."""
    count, width = survival_BT.shape
    coins_BT = torch.rand(count, width, generator=rng, dtype=torch.float64)
    place_B = torch.zeros(count, dtype=torch.int64)
    blocks_B = torch.zeros(count, dtype=torch.int64)
    by_position_BG = torch.zeros(count, GAMMA, dtype=torch.int64)
    while (running_B := place_B < LENGTH).any():
        going_B = running_B.clone()
        kept_B = torch.zeros(count, dtype=torch.int64)
        for position, keep in enumerate(keeps):
            at_B1 = (place_B + position).clamp(max=width - 1)[:, None]
            chance_B = survival_BT.gather(1, at_B1)[:, 0]
            chance_B = chance_B * min(keep, 1) + (1 - chance_B) * max(keep - 1, 0)
            going_B &= coins_BT.gather(1, at_B1)[:, 0] < chance_B
            by_position_BG[:, position] += going_B
            kept_B += going_B
        blocks_B += running_B
        place_B += torch.where(running_B, kept_B + 1, 0)
    return Counts(blocks_B, GAMMA * blocks_B, by_position_BG.sum(-1), by_position_BG)


def part(counts: Counts, rows: slice) -> Counts:
    assert counts.by_position_BG is not None
    return Counts(*(column[rows] for column in counts))


@functools.cache
def requests(count: int, keeps: tuple[float, ...]) -> list[Simulated]:
    runs = RUNS[count]
    both = simulated(runs * count, keeps, 100 * count + round(1000 * sum(keeps)))
    rows = [slice(run * count, (run + 1) * count) for run in range(runs)]
    return [Simulated(*(part(side, one) for side in both)) for one in rows]


def judge(found: Simulated) -> Agreement:
    return decide_agreement(*found)


@functools.cache
def verdicts(count: int, keeps: tuple[float, ...]) -> list[Agreement]:
    """Of all runs; several tests look at the same ones."""
    return [judge(found) for found in requests(count, keeps)]


def not_shown_to_differ(found: Simulated) -> str:
    """The mutant: agrees unless the ratio's interval leaves 0.98 to 1.02."""
    ours, theirs = (side.tokens_and_blocks for side in found)
    ratio = ratio_interval(ours, theirs[::-1])
    return "differs" if ratio.low > 1.02 or ratio.high < 0.98 else "agrees"


def rates(count: int, keeps: tuple[float, ...]) -> dict[str, float]:
    return frequencies([one.word for one in verdicts(count, keeps)])


def rates_of_mutant(count: int, keeps: tuple[float, ...]) -> dict[str, float]:
    return frequencies([not_shown_to_differ(found) for found in requests(count, keeps)])


def frequencies(words: list[str]) -> dict[str, float]:
    return {word: words.count(word) / len(words) for word in ("agrees", "differs", "undecided")}


def at_most(rate: float, count: int) -> float:
    """The rate and three standard deviations of the simulation."""
    return rate + 3 * (rate * (1 - rate) / RUNS[count]) ** 0.5


@pytest.mark.parametrize("count", RUNS)
def test_an_engine_that_is_off_rarely_agrees_and_an_exact_one_rarely_differs(count: int):
    assert rates(count, KEEPS[0.95])["agrees"] <= at_most(0.025, count)
    assert rates(count, KEEPS[0.9])["agrees"] <= 0.01
    assert rates(count, KEEPS[1.0])["differs"] <= at_most(0.02, count)


@pytest.mark.parametrize(("count", "least"), [(16, 0.35), (64, 0.97)])
def test_an_exact_engine_is_said_to_agree_with_enough_requests(count: int, least: float):
    assert rates(count, KEEPS[1.0])["agrees"] > least


@pytest.mark.parametrize(
    ("keeps", "least"), [(KEEPS[0.95], 0.8), (KEEPS[0.9], 0.97), (BY_POSITION, 0.85)]
)
def test_64_requests_show_an_engine_that_is_off(keeps: tuple[float, ...], least: float):
    """Also one with as many tokens per call as predicted, by its acceptance at the positions."""
    assert rates(64, keeps)["differs"] > least


def test_a_rule_that_agrees_where_no_difference_is_shown_is_caught():
    assert rates_of_mutant(8, KEEPS[0.95])["agrees"] > 0.8
    assert rates_of_mutant(8, KEEPS[0.9])["agrees"] > 0.3


def test_unpaired_intervals_are_caught(monkeypatch: pytest.MonkeyPatch):
    """Requests vary by more than an engine does from its prediction of each."""
    monkeypatch.setattr(agreement, "ratio_interval", unpaired)
    words = [judge(found).word for found in requests(16, KEEPS[1.0])]
    assert words.count("agrees") < 0.3 * len(words)


def unpaired(over: Pair, under: Pair) -> Interval:
    """The mutant: the product of two intervals, each over requests."""
    ours, theirs = ratio_interval(over), ratio_interval(under)
    value = ours.value * theirs.value
    half = math.hypot(*(math.log(one.high / one.low) / 2 for one in (ours, theirs)))
    return Interval(value, value * math.exp(-half), value * math.exp(half))


@pytest.mark.parametrize(("chance", "count", "blocks"), [(0.9, 8, 7), (0.8, 64, 1), (0.5, 16, 4)])
def test_an_exact_engine_rarely_differs_in_few_blocks(chance: float, count: int, blocks: int):
    """With about as few blocks as have a verdict."""
    found = several_blocks(250, chance, 3, count, blocks)
    assert num_different(found) <= 250 * 0.05 + 3 * (250 * 0.05 * 0.95) ** 0.5


def test_fewer_blocks_have_no_verdict_and_would_be_judged_wrongly(monkeypatch: pytest.MonkeyPatch):
    """All of 8 blocks are often accepted, and show no spread."""
    found = several_blocks(100, 0.97, 3, 8, 1)
    assert {judge(one).word for one in found} == {"undecided"}
    monkeypatch.setattr(agreement, "_LEAST_BLOCKS", 0)
    assert num_different(found) > 100 * 0.5


def test_six_positions_judged_by_95_percent_each_are_caught(monkeypatch: pytest.MonkeyPatch):
    found = several_blocks(150, 0.8, 6, 8, 10)
    assert num_different(found) < 150 * 0.05
    plain = agreement.difference_interval
    monkeypatch.setattr(
        *(agreement, "difference_interval"), lambda ours, theirs, **_: plain(ours, theirs)
    )
    assert num_different(found) > 150 * 0.06


def num_different(found: list[Simulated]) -> int:
    return sum(judge(one).word == "differs" for one in found)


def several_blocks(
    runs: int, chance: float, gamma: int, count: int, blocks: int
) -> list[Simulated]:
    """Requests with this many blocks each, whose tokens are accepted with the predicted chance."""
    rng = torch.Generator().manual_seed(3)
    shape = runs, count, blocks, gamma
    coins = torch.rand(shape, generator=rng, dtype=torch.float64) < chance
    kept = coins.double().cumprod(-1).sum(2)
    expected = torch.full(shape, chance, dtype=torch.float64).cumprod(-1).sum(2)
    blocks_B = torch.full((count,), float(blocks), dtype=torch.float64)
    return [
        Simulated(*(Counts(blocks_B, gamma * blocks_B, one.sum(-1), one) for one in (ours, theirs)))
        for ours, theirs in zip(kept, expected, strict=True)
    ]
