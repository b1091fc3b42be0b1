"""Coverage of the intervals of speedups and costs, of servers that differ between starts.

Each server is started three times, with a third of the requests or rounds in each start. Coverage
in a simulation of n runs is binomial; floors of 95% allow three standard deviations.
"""

import functools
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from paceline.core.sampling import SamplingParams
from paceline.engines.contract import BlockCounts, Engine, Request, Served
from paceline.measure import engine_costs, served
from paceline.measure.engine_costs import StepTimer, WriteCosts, over_starts
from paceline.measure.served import Answers
from paceline.progress import silent
from paceline.results.figures import FIGURES
from paceline.results.row import Row, Source

TOKENS, GAMMAS, STEP_S, STARTS = 64, (0, 1, 3, 6), 0.01, 3
RUNS = 80
REQUESTS = Row(
    population="requests",
    units=tuple(range(63)),
    setting={},
    totals={"cost_ratio": 1.6},
    source=Source(command="measure --engine"),
)
FLOOR = 0.95 - 3 * (0.95 * 0.05 / RUNS) ** 0.5


def factor(deviation: float, rng: torch.Generator) -> float:
    return float((deviation * torch.randn((), generator=rng)).exp())


def answers(drafts: bool, deviation: float, rng: torch.Generator) -> Answers:
    """63 requests: a token takes 10 ms, a block 16 ms; blocks give 1.6 to 2.7 tokens."""
    blocks = torch.randint(24, 41, (63,), generator=rng).tolist()
    noise = (0.05 * torch.randn(63, generator=rng)).exp().tolist()
    slow = [factor(deviation, rng) for _ in range(STARTS)]
    by_start: list[dict[int, Served]] = [{} for _ in range(STARTS)]
    for at in range(63):
        passed = 1.6 * STEP_S * blocks[at] if drafts else STEP_S * TOKENS
        counts = BlockCounts(num_blocks=blocks[at]) if drafts else None
        one = Served([1] * TOKENS, passed * noise[at] * slow[at % STARTS], counts)
        by_start[at % STARTS][at] = one
    return Answers(Noisy(0, 0, rng), by_start)


def speedups(deviation: float) -> float:
    """Part of the runs whose interval holds the true speedup."""
    truth = TOKENS / (1.6 * 32)
    held, rng = 0, torch.Generator().manual_seed(round(1000 * deviation))
    for _ in range(RUNS):
        plain, drafted = (answers(drafts, deviation, rng) for drafts in (False, True))
        row = served.timed_requests(REQUESTS, plain.served, drafted.served)
        within = FIGURES["speedup"].measure(row)
        found = over_starts(within, served.speedup_by_start(plain, drafted))
        held += found.low <= truth <= found.high
    return held / RUNS


class Noisy(Engine):
    """A step takes 10 ms and 2 more for each drafted token, times the error of this start."""

    name = "vllm"

    def __init__(self, gamma: int, deviation: float, rng: torch.Generator) -> None:
        self._gamma, self._rng = gamma, rng
        self._step_s = (STEP_S + 0.002 * gamma) * factor(deviation, rng)

    def serve(self, request: Request) -> Served:
        raise NotImplementedError

    def serve_together(self, requests: Sequence[Request], batch_size: int) -> Served:
        steps = [request.max_new_tokens for request in requests]
        seconds = [one * self._step_s * factor(0.02, self._rng) / batch_size for one in steps]
        blocks = BlockCounts(num_blocks=sum(steps), num_drafted=self._gamma * sum(steps))
        return Served([1] * sum(steps), sum(seconds), blocks if self._gamma else None)


@functools.cache
def timed_steps(deviation: float) -> list[StepTimer]:
    rng = torch.Generator().manual_seed(round(1000 * deviation) + 1)
    requests = [Request([1], TOKENS, SamplingParams(temperature=0), 0)]
    config = WriteCosts(file=Path("unused"), gammas=GAMMAS[1:])
    timers = [StepTimer(config, requests, silent, STARTS) for _ in range(RUNS)]
    for timer in timers:
        for start in range(STARTS):
            for gamma in GAMMAS:
                timer.time({gamma: Noisy(gamma, deviation, rng)}, start)
    return timers


def steps(deviation: float) -> float:
    """Part of the costs whose interval holds the true value."""
    held = list[bool]()
    for timer in timed_steps(deviation):
        for one in timer.costs():
            held.append(one.seconds.low <= STEP_S + 0.002 * one.gamma <= one.seconds.high)
    return sum(held) / len(held)


@pytest.mark.parametrize("deviation", [0.0, 0.03, 0.1])
def test_the_intervals_of_a_speedup_and_of_a_step_hold_the_truth(deviation: float):
    assert speedups(deviation) > FLOOR
    assert steps(deviation) > FLOOR


def test_intervals_within_a_start_are_caught(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(engine_costs, "_LEAST_STARTS", STARTS + 1)
    assert speedups(0.1) < 0.85
    assert steps(0.1) < 0.7


def test_few_starts_taken_for_many_are_caught(monkeypatch: pytest.MonkeyPatch):
    """The mutant: the deviation of few starts as if it were exact."""
    normal = float(torch.distributions.Normal(0.0, 1.0).icdf(torch.tensor(0.975)))
    monkeypatch.setattr(engine_costs, "student_quantile", lambda *_: normal)
    assert speedups(0.1) < FLOOR
    assert steps(0.1) < FLOOR
