"""Coverage of the intervals in simulated requests, and how often they say GO at a speedup of 1.

Coverage in a simulation of n samples is binomial; the floors lie 4 standard deviations below what
larger simulations FOUND (the table in `paceline.core.bootstrap`), odds of a false alarm below 1e-4
for each case under another seed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from paceline.core.bootstrap import LEAST_UNITS, Interval, ratio_interval
from support.exact import limit

RESAMPLES = 500
SAMPLES = {8: 400, 16: 250, 64: 120}
FOUND = {
    "equal": {8: 0.97, 16: 0.971, 64: 0.961},
    "cut": {8: 0.954, 16: 0.957, 64: 0.95},
    "skewed": {8: 0.919, 16: 0.935, 64: 0.938},
}
OF_ACCEPTANCE = {8: 0.907, 16: 0.935, 64: 0.935}


class Requests(NamedTuple):
    """Seconds and tokens of the baseline and of the method, [N] each."""

    baseline_s: Tensor
    baseline_tokens: Tensor
    method_s: Tensor
    method_tokens: Tensor


def lengths(kind: str, count: int, rng: torch.Generator) -> Tensor:
    """New tokens: all of 64, log-normal and cut at 64 (about half are), or log-normal to 512."""
    if kind == "equal":
        return torch.full((count,), 64.0, dtype=torch.float64)
    normal = torch.randn(count, generator=rng, dtype=torch.float64)
    if kind == "cut":
        return (0.9 * normal + 4).exp().ceil().clamp(2, 64)
    return (normal + 3).exp().ceil().clamp(2, 512)


def requests(kind: str, same: bool, count: int, rng: torch.Generator) -> Requests:
    """Requests that take 0.5 for the prompt, then 1 a token, or 1.6 a block of 1 to 2.9 tokens.

    How many tokens a block gives is the text's own; both ways share how slow a request is. `same`:
    both write texts of one length, as greedy decoding does.
    """
    normals = torch.randn(3, count, generator=rng, dtype=torch.float64)
    slow, *noise = (0.1 * normals[0]).exp(), *(0.03 * normals[1:]).exp()
    baseline_tokens = lengths(kind, count, rng)
    method_tokens = baseline_tokens if same else lengths(kind, count, rng)
    uniform = torch.rand(count, generator=rng, dtype=torch.float64)
    blocks = (method_tokens * (0.35 + 0.65 * uniform**1.5)).ceil()
    return Requests(
        slow * (0.5 + baseline_tokens * noise[0]),
        baseline_tokens,
        slow * (0.5 + 1.6 * blocks * noise[1]),
        method_tokens,
    )


def speedup(found: Requests) -> float:
    sums = [float(part.sum()) for part in found]
    return sums[0] / sums[1] / (sums[2] / sums[3])


@functools.cache
def true_speedup(kind: str, same: bool) -> float:
    return speedup(requests(kind, same, 1_000_000, torch.Generator().manual_seed(99)))


def studentised(found: Requests, _: torch.Generator) -> Interval:
    return ratio_interval(found[:2], (found.method_tokens, found.method_s))


def percentile(found: Requests, rng: torch.Generator) -> Interval:
    """The mutant."""
    picks = torch.randint(len(found[0]), (RESAMPLES, len(found[0])), generator=rng)
    sums = [part[picks].sum(-1) for part in found]
    values = sums[0] / sums[1] / (sums[2] / sums[3])
    low, high = torch.quantile(values, torch.tensor([0.025, 0.975], dtype=torch.float64))
    return Interval(speedup(found), float(low), float(high))


def floor(coverage: float, count: int) -> float:
    """4 standard deviations of the simulation below this coverage."""
    return 1 - limit(1 - coverage, SAMPLES[count])


Way = Callable[[Requests, torch.Generator], Interval]


def rates(way: Way, kind: str, same: bool, count: int, samples: int) -> tuple[float, float]:
    """How often an interval holds the true speedup, and how often it is wholly above.

    It is above a speedup of 1 as often, if the seconds of the method are scaled to that.
    """
    rng, truth = torch.Generator().manual_seed(count), true_speedup(kind, same)
    held = above = 0
    for _ in range(samples):
        found = way(requests(kind, same, count, rng), rng)
        held += found.low <= truth <= found.high
        above += found.low > truth
    return held / samples, above / samples


WORLDS = [("equal", True), ("cut", True), ("cut", False), ("skewed", True), ("skewed", False)]


@pytest.mark.parametrize(
    ("kind", "same", "count"),
    [
        *((*world, 8) for world in WORLDS),
        *((*world, count) for world in (("cut", True), ("skewed", False)) for count in (16, 64)),
    ],
)
def test_the_interval_of_a_speedup_holds_the_truth(kind: str, same: bool, count: int):
    """At a true speedup of 1, 8 requests say GO in 1.5 to 4.2% of larger simulations."""
    held, above = rates(studentised, kind, same, count, SAMPLES[count])
    assert held > floor(FOUND[kind][count], count)
    if count == LEAST_UNITS:
        assert above < limit(0.042, SAMPLES[count])


def test_the_percentile_bootstrap_is_caught():
    assert rates(percentile, "cut", True, 8, SAMPLES[8])[0] < floor(FOUND["cut"][8], 8)
    assert rates(percentile, "cut", True, 3, 400)[0] < 0.83


@pytest.mark.parametrize("count", [2, 3, 5])
def test_few_requests_give_wide_intervals_that_hold_the_truth(count: int):
    """500 samples; larger simulations found 90 to 92%."""
    assert rates(studentised, "cut", True, count, 500)[0] > 0.846


def test_the_percentile_bootstrap_of_2_requests_says_go_one_time_in_four():
    """At a true speedup of 1."""
    assert rates(percentile, "cut", True, 2, 400)[1] > 0.16


@pytest.mark.parametrize("count", SAMPLES)
@pytest.mark.parametrize("kind", ["cut", "skewed"])
def test_the_interval_of_acceptance_holds_the_truth(kind: str, count: int):
    """Acceptance is the text's own, and noisier in a short text."""

    def accepted(size: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        tokens = lengths(kind, size, rng)
        own = 0.35 + 0.5 * torch.rand(size, generator=rng, dtype=torch.float64)
        noise = 0.3 * torch.randn(size, generator=rng, dtype=torch.float64) / tokens.sqrt()
        return (own + noise).clamp(0, 1) * tokens, tokens

    tops, bottoms = accepted(1_000_000, torch.Generator().manual_seed(98))
    truth = float(tops.sum() / bottoms.sum())
    rng, held = torch.Generator().manual_seed(count), 0
    for _ in range(SAMPLES[count]):
        tops, bottoms = accepted(count, rng)
        found = ratio_interval((tops, bottoms), most=1.0)
        held += found.low <= truth <= found.high
    assert held / SAMPLES[count] > floor(OF_ACCEPTANCE[count], count)
