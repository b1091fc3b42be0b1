"""Servers that are started in turn: how often, in which order, and what is asked of each."""

import math
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

from paceline.core.bootstrap import Interval
from paceline.core.sampling import SamplingParams
from paceline.engines.client import Client
from paceline.engines.commands import EngineChoice, Setup
from paceline.engines.contract import Engine, Request, Served, together
from paceline.engines.process import connect
from paceline.engines.servers import VllmServer
from paceline.measure import served_runs
from paceline.measure.served import ServedMeasurement, measure_served
from paceline.measure.served_runs import Answers
from paceline.measure.starts import Starts, spread_of, turns
from paceline.models import CausalModel
from paceline.progress import Progress
from support.engines import (
    GAMMA,
    Speculating,
    llamacpp_routes,
    served_config,
    serving,
    sglang_routes,
    vllm_routes,
    write_near_pair,
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pair(folder: Path) -> tuple[CausalModel, CausalModel]:
    return write_near_pair(folder)


class Counting(Engine):
    """Stands for a server; notes the seed of each request."""

    name, conventions = "vllm", VllmServer.conventions

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
    assert [gamma for gamma, _ in servers] == [GAMMA, 0, 0, GAMMA]
    even, odd = [0, *range(0, 12, 2)], [1, *range(1, 12, 2)]
    assert [asked for _, asked in servers] == [even, even, odd, odd]
    assert (found.starts.number, found.starts.freedom) == (2, 2)
    assert "contain the variation between starts" in found.starts.words
    assert found.agreement.num_different == 0, "answers are in the order of the requests"
    assert found.speed is not None
    assert found.speed.num_equal == 12
    assert "starting servers 0/4 0 s" in said
    assert "starting servers 4/4 0 s" in said
    twice = sum(len(asked) for _, asked in servers)
    servers.clear()
    once = measured(folder, starts=1)
    assert [gamma for gamma, _ in servers] == [GAMMA, 0]
    assert twice == sum(len(asked) for _, asked in servers) + 2
    assert once.starts.freedom == 0
    assert "is not in the intervals" in once.starts.words


def test_costs_of_two_starts_take_as_many_requests_as_of_one(
    folder: Path, servers: Started, tmp_path: Path
):
    costs = {"file": str(tmp_path / "costs.json"), "gammas": [1, GAMMA], "num_rounds": 6}
    sizes: list[int] = []
    for starts in (1, 2):
        found = measured(folder, write_costs=costs, starts=starts)
        configurations = [GAMMA, 0, 1]
        wanted = configurations if starts == 1 else [*configurations, *configurations[::-1]]
        assert [gamma for gamma, _ in servers] == wanted
        sizes.append(sum(len(asked) for _, asked in servers))
        servers.clear()
        assert found.costs is not None
        assert [len(one.seconds_by_start) for one in found.costs.steps] == [starts] * 3
        assert found.costs.starts == found.starts
        assert found.starts.freedom == 3 * (starts - 1)
    assert sizes[1] == sizes[0] + 2, "a warm-up request more with the draft, and without"


def test_counts_without_seconds_need_one_start(folder: Path, servers: Started):
    found = measured(folder, plain=False)
    assert [gamma for gamma, _ in servers] == [GAMMA]
    assert found.starts.number == 1


def test_the_variation_between_starts_is_pooled_and_added_by_students_t():
    """By hand: variances 0.02, the mean of 0.08 and 0, and 0; three degrees of freedom."""
    logs = {0: [[0.0, 0.2]], 1: [[0.0, 0.4], [3.0, 3.0]], 3: [[1.0, 1.0]]}
    found = spread_of(logs, 2, 7.0)
    assert found.deviation**2 == pytest.approx((0.02 + 0.04 + 0) / 3)
    assert (found.freedom, found.seconds) == (3, 7.0)
    more = float(stats.t.ppf(0.975, 3)) * found.deviation
    low, high = (0.01**2 + more**2) ** 0.5, (0.02**2 + more**2) ** 0.5
    wide = found.widen(Interval(2.0, 2.0 * 0.99004983, 2.0 * 1.02020134), 2)
    assert wide.low == pytest.approx(2 * 2.718281828**-low, rel=1e-6)
    assert wide.high == pytest.approx(2 * 2.718281828**high, rel=1e-6)
    assert Starts(number=1).widen(wide, 2) == wide
    unknown = Interval(2.0, 0.0, float("inf"))
    assert found.widen(unknown, 1) == unknown


def test_turns_go_there_and_back():
    assert list(turns([3, 0, 1], 2)) == [(0, 3), (0, 0), (0, 1), (1, 1), (1, 0), (1, 3)]


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
    logs = Answers(server, timed).logs()
    assert logs == pytest.approx([math.log(0.01)] * 2)
    assert spread_of({0: [logs]}, 2, 0.0).deviation == pytest.approx(0, abs=1e-9)
