"""Servers that are started in turn: how often, in which order, and what is asked of each."""

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from paceline.core.bootstrap import Interval
from paceline.core.sampling import SamplingParams
from paceline.engines.client import Client
from paceline.engines.commands import EngineChoice
from paceline.engines.contract import Engine, Request, Served, Setup, together
from paceline.engines.process import connect
from paceline.measure import served_runs
from paceline.measure.engine_costs import Starts, over_starts
from paceline.measure.served import ServedMeasurement, measure_served
from paceline.measure.served_runs import Answers, num_passes
from paceline.models import CausalModel
from paceline.progress import Progress
from support.engines import (
    GAMMA,
    Speculating,
    costs_of,
    llamacpp_routes,
    served_config,
    serving,
    sglang_routes,
    step,
    vllm_routes,
    write_near_pair,
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pair(folder: Path) -> tuple[CausalModel, CausalModel]:
    return write_near_pair(folder)


class Counting(Engine):
    """Stands for a server; notes the seed of each request."""

    name, counts_behind_end = "vllm", True

    def __init__(self, engine: Speculating, asked: list[int]) -> None:
        self._engine, self._asked = engine, asked

    def serve(self, request: Request) -> Served:
        self._asked.append(request.seed)
        return self._engine.answer(request)

    def serve_together(self, requests: Sequence[Request], batch_size: int) -> Served:
        del batch_size
        return together([self.serve(request) for request in requests])


Started = list[tuple[int, list[int]]]
"""Of each start, the drafted tokens per block and the seeds of its requests."""


@pytest.fixture
def servers(pair: tuple[CausalModel, CausalModel], monkeypatch: pytest.MonkeyPatch) -> Started:
    """What was started and asked, while this stands for a server."""
    target, draft = pair
    found: Started = []

    @contextmanager
    def started(choice: EngineChoice, setup: Setup, progress: Progress) -> Iterator[Engine]:
        del choice
        progress("starting the server", 5, 900)
        gamma = 0 if setup.drafting is None else setup.drafting.gamma
        found.append((gamma, []))
        engine = Speculating(target, draft if gamma else None, gamma, behind_end=True)
        yield Counting(engine, found[-1][1])

    monkeypatch.setattr(served_runs, "started", started)
    monkeypatch.setattr("paceline.data.input_checks.check_choice", lambda _: None)
    return found


def measured(folder: Path, said: list[str] | None = None, **changes: Any) -> ServedMeasurement:
    settings = {"num_prompts": 12, "max_new_tokens": 12, "sampling": {"temperature": 0.0}}

    def progress(stage: str, done: float, total: float, note: str = "") -> None:
        if said is not None:
            said.append(f"{stage} {done:.0f}/{total:.0f} {note}")

    settings |= changes
    return measure_served(served_config(folder, {"engine": "vllm"}, **settings), progress)


def test_each_side_is_started_twice_in_turn_and_answers_half_of_the_requests_each_time(
    folder: Path, servers: Started
):
    """The default asks for one request more per side than one start does: its warm-up."""
    said: list[str] = []
    found = measured(folder, said)
    assert [gamma for gamma, _ in servers] == [GAMMA, 0, GAMMA, 0]
    even, odd = [0, *range(0, 12, 2)], [1, *range(1, 12, 2)]
    assert [asked for _, asked in servers] == [even, even, odd, odd]
    assert found.starts.number == 2
    assert "the intervals of seconds leave out (3 starts have it)" in found.starts.words
    assert found.agreement.num_different == 0, "answers are in the order of the requests"
    assert found.speed is not None
    assert found.speed.num_equal == 12
    assert len(found.speed.speedup_by_start) == 2
    assert "starting servers 0/4 0 s" in said
    assert any(line.startswith("starting servers 4/4") for line in said)
    twice = sum(len(asked) for _, asked in servers)
    servers.clear()
    once = measured(folder, starts=1)
    assert [gamma for gamma, _ in servers] == [GAMMA, 0]
    assert twice == sum(len(asked) for _, asked in servers) + 2
    assert "is not in the intervals" in once.starts.words


def test_costs_of_two_starts_take_as_many_requests_as_of_one(
    folder: Path, servers: Started, tmp_path: Path
):
    costs = {"file": str(tmp_path / "costs.json"), "gammas": [1, GAMMA], "num_rounds": 6}
    sizes: list[int] = []
    for starts in (1, 2):
        found = measured(folder, write_costs=costs, starts=starts)
        configurations = [GAMMA, 0, 1]
        assert [gamma for gamma, _ in servers] == configurations * starts
        sizes.append(sum(len(asked) for _, asked in servers))
        servers.clear()
        assert found.costs is not None
        assert [len(one.seconds_by_start) for one in found.costs.steps] == [starts] * 3
        assert found.costs.starts == found.starts
        assert found.starts.number == starts
    assert sizes[1] == sizes[0] + 2, "a warm-up request more with the draft, and without"


def test_counts_without_seconds_need_one_start(folder: Path, servers: Started):
    found = measured(folder, plain=False)
    assert [gamma for gamma, _ in servers] == [GAMMA]
    assert found.starts.number == 1


def test_from_three_starts_on_the_interval_of_the_speedup_is_over_them(
    folder: Path, servers: Started
):
    found = measured(folder, starts=3)
    assert [gamma for gamma, _ in servers] == [GAMMA, 0] * 3
    assert found.speed is not None
    logs = np.log(found.speed.speedup_by_start)
    half = stats.t.ppf(0.975, 2) * logs.std(ddof=1) / 3**0.5
    value, low, high = found.speed.speedup
    assert (low, high) == pytest.approx((value * np.exp(-half), value * np.exp(half)))
    assert "intervals of seconds are over starts" in found.starts.words


def test_an_interval_over_starts_is_students_t_of_the_logarithms():
    by_start = [1.0, 1.1, 1.3]
    found = over_starts(Interval(2.0, 1.9, 2.1), by_start)
    logs = np.log(by_start)
    half = stats.t.ppf(0.975, 2) * logs.std(ddof=1) / 3**0.5
    assert found == pytest.approx((2.0, 2 * np.exp(-half), 2 * np.exp(half)))
    assert over_starts(Interval(2.0, 1.9, 2.1), by_start[:2]) == Interval(2.0, 1.9, 2.1)


def test_a_block_over_a_step_has_the_error_of_the_starts_ratios():
    """A start that is slow as a whole slows both."""
    plain, block = [0.010, 0.011, 0.012], [0.015, 0.0165, 0.018]
    steps = [
        step(gamma, seconds[0]).model_copy(update={"seconds_by_start": seconds})
        for gamma, seconds in ((0, plain), (2, block))
    ]
    costs = costs_of(*steps, starts=Starts(number=3))
    assert costs.step_costs([2], 1).errors[2] == pytest.approx((1, 1, 1))
    once = costs_of(step(0, 0.01), step(2, 0.015)).step_costs([2], 1)
    assert once.errors[2] == pytest.approx((1, 0.9 / 1.1, 1.1 / 0.9))


@pytest.mark.parametrize("engine", ["vllm", "llamacpp", "sglang"])
def test_lengths_of_answers_without_a_draft_are_no_variation_between_starts(
    engine: str, pair: tuple[CausalModel, CausalModel]
):
    """A token takes 10 ms in both starts, whose answers have other lengths."""
    routes = {"vllm": vllm_routes, "llamacpp": llamacpp_routes, "sglang": sglang_routes}[engine]
    with serving(routes(pair[0], None, GAMMA)) as url, closing(Client(url)) as client:
        choice = EngineChoice(engine=engine, url=url)  # pyright: ignore[reportArgumentType]
        server = connect(choice, client)
        by_start = [
            {number: server.serve(Request([5, 6], length, SamplingParams(), number))}
            for number, length in enumerate((4, 24))
        ]
    timed = [
        {number: one._replace(seconds=0.01 * len(one.tokens)) for number, one in start.items()}
        for start in by_start
    ]
    first, second = ([len(one.tokens) for one in start.values()] for start in timed)
    assert first != second
    assert Answers(server, timed).seconds_per(num_passes) == pytest.approx([0.01] * 2)
