"""Coverage of the intervals of speedups and costs, of servers that differ between starts.

Each server is started twice, with half of the requests or rounds in each start. Coverage in a
simulation of n runs is binomial; floors of 95% allow three standard deviations.
"""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from paceline.core.bootstrap import Interval
from paceline.core.sampling import SamplingParams
from paceline.engines.contract import BlockCounts, Engine, Request, Served
from paceline.measure import served
from paceline.measure.engine_costs import StepTimer, WriteCosts
from paceline.measure.served_runs import Answers
from paceline.measure.starts import Starts, spread_of
from paceline.progress import silent
from paceline.results.row import Row, Source

TOKENS, GAMMAS, STEP_S = 64, (0, 1, 3, 6), 0.01
RUNS = 150
REQUESTS = Row(
    population="requests",
    units=tuple(range(64)),
    setting={},
    totals={"cost_ratio": 1.6},
    source=Source(command="measure --engine"),
)
FLOOR = 0.95 - 3 * (0.95 * 0.05 / RUNS) ** 0.5

Judged = Callable[[Starts], Starts]


def as_found(starts: Starts) -> Starts:
    return starts


def one_start(starts: Starts) -> Starts:
    """The mutant: only the variation within a start."""
    return Starts(number=starts.number)


def as_if_known(starts: Starts) -> Starts:
    """The mutant: the deviation of few starts as if it were exact."""
    return starts.model_copy(update={"freedom": 1000 if starts.freedom else 0})


def factor(deviation: float, rng: torch.Generator) -> float:
    return float((deviation * torch.randn((), generator=rng)).exp())


def answers(drafts: bool, number: int, deviation: float, rng: torch.Generator) -> Answers:
    """64 requests: a token takes 10 ms, a block 16 ms; blocks give 1.6 to 2.7 tokens."""
    blocks = torch.randint(24, 41, (64,), generator=rng).tolist()
    noise = (0.05 * torch.randn(64, generator=rng)).exp().tolist()
    slow = [factor(deviation, rng) for _ in range(number)]
    by_start: list[dict[int, Served]] = [{} for _ in range(number)]
    for at in range(64):
        passed = 1.6 * STEP_S * blocks[at] if drafts else STEP_S * TOKENS
        counts = BlockCounts(num_blocks=blocks[at]) if drafts else None
        one = Served([1] * TOKENS, passed * noise[at] * slow[at % number], counts)
        by_start[at % number][at] = one
    return Answers(Noisy(0, 0, rng), by_start)


def speedups(deviation: float, judged: Judged) -> float:
    """Part of the runs whose interval holds the true speedup."""
    truth = TOKENS / (1.6 * 32)
    held = 0
    for plain, drafted, starts in timed_requests(deviation):
        row = served.timed_requests(REQUESTS, plain, drafted)
        found = served.speedup(row, judged(starts), 0)
        held += found.low <= truth <= found.high
    return held / RUNS


@functools.cache
def timed_requests(deviation: float) -> list[tuple[list[Served], list[Served], Starts]]:
    rng, runs = torch.Generator().manual_seed(round(1000 * deviation)), []
    for _ in range(RUNS):
        plain, drafted = (answers(drafts, 2, deviation, rng) for drafts in (False, True))
        starts = spread_of({0: [plain.logs()], 3: [drafted.logs()]}, 2, 0)
        runs.append((plain.served, drafted.served, starts))
    return runs


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
    config = WriteCosts(file=Path("unused"), gammas=GAMMAS[1:], batch_sizes=(1, 2))
    timers = [StepTimer(config, requests, silent, 2) for _ in range(RUNS)]
    for timer in timers:
        for start in (0, 1):
            for gamma in GAMMAS:
                timer.time({gamma: Noisy(gamma, deviation, rng)}, start)
    return timers


def steps(deviation: float, judged: Judged) -> tuple[float, float]:
    """Parts of the costs and of blocks / plain steps whose interval holds the true value."""
    held, of_blocks = list[bool](), list[bool]()
    for timer in timed_steps(deviation):
        found = {
            one.gamma: Interval(one.seconds.value, one.seconds.low, one.seconds.high)
            for one in timer.costs(judged(spread_of(timer.logs(), 2, 0)))
            if one.batch_size == 1
        }
        low, high = found[3].low / found[0].high, found[3].high / found[0].low
        of_blocks.append(low <= 1.6 <= high)
        held += [one.low <= STEP_S + 0.002 * gamma <= one.high for gamma, one in found.items()]
    return sum(held) / len(held), sum(of_blocks) / len(of_blocks)


between_starts = pytest.mark.parametrize("deviation", [0.0, 0.03, 0.1])


@between_starts
def test_the_interval_of_a_speedup_holds_the_truth(deviation: float):
    assert speedups(deviation, as_found) > FLOOR


@between_starts
def test_the_intervals_of_a_step_and_of_a_block_over_a_step_hold_the_truth(deviation: float):
    of_steps, of_blocks = steps(deviation, as_found)
    assert of_steps > FLOOR
    assert of_blocks > FLOOR


@pytest.mark.parametrize("deviation", [0.03, 0.1])
def test_intervals_of_one_start_are_caught(deviation: float):
    assert speedups(deviation, one_start) < 0.85
    assert steps(deviation, one_start)[0] < 0.7


def test_few_starts_taken_for_many_are_caught():
    assert speedups(0.1, as_if_known) < FLOOR
    assert steps(0.1, as_if_known)[0] < FLOOR
