"""Servers that are started in turn, their faults, and keys, which stay out of the record."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from paceline.core.bootstrap import Interval
from paceline.engines.commands import EngineChoice
from paceline.engines.contract import Engine, Request, Served, Setup, together
from paceline.errors import EngineError, PacelineError, UsageError
from paceline.measure import served
from paceline.measure.engine_costs import over_starts
from paceline.measure.served import ServedMeasurement, measure_served
from paceline.models import CausalModel
from paceline.progress import Progress
from support.engines import (
    GAMMA,
    Route,
    Speculating,
    costs_of,
    serving,
    step,
    vllm_routes,
    write_near_pair,
)
from support.engines import served_config as config

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
        del choice, progress
        gamma = 0 if setup.drafting is None else setup.drafting.gamma
        found.append((gamma, []))
        engine = Speculating(target, draft if gamma else None, gamma, behind_end=True)
        yield Counting(engine, found[-1][1])

    monkeypatch.setattr(served, "started", started)
    monkeypatch.setattr("paceline.data.input_checks.check_choice", lambda _: None)
    return found


def measured(folder: Path, **changes: Any) -> ServedMeasurement:
    settings = {"num_prompts": 12, "max_new_tokens": 12, "sampling": {"temperature": 0.0}}
    return measure_served(config(folder, {"engine": "vllm"}, **settings | changes))


def test_each_side_is_started_twice_in_turn_and_answers_half_of_the_requests_each_time(
    folder: Path, servers: Started
):
    """The default asks for one request more per side than one start does: its warm-up."""
    found = measured(folder)
    assert [gamma for gamma, _ in servers] == [GAMMA, 0, GAMMA, 0]
    even, odd = [0, *range(0, 12, 2)], [1, *range(1, 12, 2)]
    assert [asked for _, asked in servers] == [even, even, odd, odd]
    assert found.starts == 2
    assert found.agreement.num_different == 0, "answers are in the order of the requests"
    assert found.speed is not None
    assert found.speed.num_equal == 12
    assert len(found.speed.speedup_by_start) == 2
    twice = sum(len(asked) for _, asked in servers)
    servers.clear()
    once = measured(folder, starts=1)
    assert [gamma for gamma, _ in servers] == [GAMMA, 0]
    assert twice == sum(len(asked) for _, asked in servers) + 2
    assert once.starts == 1


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
        assert found.starts == starts
    assert sizes[1] == sizes[0] + 2, "a warm-up request more with the draft, and without"


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
    costs = costs_of(*steps, starts=3)
    assert costs.step_costs([2], 1).errors[2] == pytest.approx((1, 1, 1))
    once = costs_of(step(0, 0.01), step(2, 0.015)).step_costs([2], 1)
    assert once.errors[2] == pytest.approx((1, 0.9 / 1.1, 1.1 / 0.9))


ENDED = {"text": "...", "finish_reason": "length"}


def broken(folder: Path, routes: dict[str, Route], **changes: Any) -> str:
    """The one line that a server's fault becomes."""
    with (
        serving(routes, key=changes.pop("key", None)) as url,
        pytest.raises(PacelineError) as caught,
    ):
        measure_served(config(folder, {"engine": "vllm", "url": url, **changes}))
    return str(caught.value)


def test_every_fault_of_a_server_is_one_line(
    folder: Path,
    pair: tuple[CausalModel, CausalModel],
    monkeypatch: pytest.MonkeyPatch,
):
    right = vllm_routes(*pair, GAMMA)
    for status, said in ((429, "answered 429"), (500, "check the server log")):
        faulty = right | {"/v1/completions": lambda _, s=status: (s, {"error": {"message": "no"}})}
        assert said in broken(folder, faulty)
    shapeless = right | {"/v1/completions": lambda _: (200, {"choices": None})}
    assert "with invalid choices" in broken(folder, shapeless)
    half = right | {"/v1/completions": lambda _: (200, '{"choices": [{"token_i')}
    assert "is not JSON" in broken(folder, half)
    assert "the API key is wrong or missing" in broken(folder, right, key="secret")
    monkeypatch.setenv("MY_KEY", "wrong")
    assert "the API key is wrong or missing" in broken(
        folder, right, key="secret", api_key_env="MY_KEY"
    )
    short = right | {
        "/v1/completions": lambda _: (200, {"choices": [{**ENDED, "token_ids": [5, 6]}]})
    }
    assert "generated 2 tokens where 24 were requested" in broken(folder, short)
    assert "answered 404" in broken(folder, {})


def test_a_key_is_in_no_record(
    folder: Path, pair: tuple[CausalModel, CausalModel], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("MY_KEY", "sesame-open")
    engine = {"engine": "vllm", "api_key_env": "MY_KEY"}
    with serving(vllm_routes(*pair, GAMMA), key="sesame-open") as url:
        found = measure_served(config(folder, engine | {"url": url}, num_prompts=2))
    assert "sesame-open" not in found.model_dump_json()


def test_nobody_at_the_url_and_no_url_at_all(folder: Path, pair: tuple[CausalModel, CausalModel]):
    del pair
    with pytest.raises(EngineError, match="cannot be reached"):
        measure_served(config(folder, {"engine": "vllm", "url": "http://127.0.0.1:9"}))
    for url, said in (
        ("ftp://x", "is not the URL of a server"),
        ("http://x:abc", "is not the URL of a server"),
        ("http://[::1", "is not the URL of a server"),
    ):
        with pytest.raises(UsageError, match=said) as caught:
            measure_served(config(folder, {"engine": "vllm", "url": url}))
        assert "secret" not in str(caught.value)
    with pytest.raises(UsageError, match="is not installed here"):
        measure_served(config(folder, {"engine": "vllm", "program": "no-such-program"}))
