"""Which gammas are timed, and that a wrong prediction does not decide."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from paceline.measure import latency
from paceline.measure.latency import PassCosts, candidates, num_choosing
from paceline.measure.measurement import MeasureConfig, Measurement, measure_models
from paceline.measure.results import gamma_of
from paceline.results import FIGURES
from support.fakes import TableModel
from support.results import gamma_row

EXPECTED = FIGURES["expected_speedup"]
PROMPTS = [[number // 25, number // 5 % 5, number % 5] for number in range(64)]


@pytest.mark.parametrize(
    ("expected", "wanted"),
    [
        ({1: 1.0}, [1]),
        ({1: 1.0, 2: 1.1}, [2, 1]),
        ({1: 1.0, 2: 1.1, 3: 1.2}, [3, 2, 1]),
        # a block of half the length is far enough away to win where drafting is dearer than thought
        ({1: 1.0, 2: 1.1, 3: 1.2, 4: 1.3, 5: 1.4, 6: 1.5, 8: 1.6}, [8, 6, 4]),
        ({1: 1.5, 2: 1.4, 3: 1.2, 4: 1.1}, [1, 2, 3]),
    ],
)
def test_the_two_best_and_a_shorter_one_are_candidates(
    expected: dict[int, float], wanted: list[int]
):
    rows = [gamma_row(gamma, 2.0 * speedup) for gamma, speedup in expected.items()]
    assert [gamma_of(row) for row in candidates(rows)] == wanted


def test_few_requests_are_all_for_the_verdict():
    found = {count: num_choosing(count) for count in (1, 8, 9, 10, 16, 32, 64)}
    assert found == {1: 0, 8: 0, 9: 0, 10: 2, 16: 4, 32: 8, 64: 8}


class Clock:
    """A target pass takes 10 seconds, a draft pass 1, but more in a text than timed alone."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, draft_s: int) -> None:
        tables = torch.full((2, 5, 5), 0.1)
        tables[:, range(5), [1, 2, 3, 4, 0]] = 0.6
        tables[1] = 0.85 * tables[1] + 0.03
        self.target, self.draft = (TableModel(table) for table in tables)
        monkeypatch.setattr(latency, "_now", self.now)
        self.draft_s = draft_s
        self.costs = PassCosts(
            10.0,
            1.0,
            {gamma: float(gamma) for gamma in range(1, 9)},
            dict.fromkeys(range(1, 9), 10.0),
        )
        monkeypatch.setattr(latency.PassTimer, "costs", lambda _: self.costs)

    def now(self, *_: object) -> float:
        return 10 * self.target.num_passes + self.draft_s * self.draft.num_passes

    def measure(self, timed_prompts: int = 32, seed: int = 0) -> Measurement:
        config = MeasureConfig(
            target="t",
            draft="d",
            prompts="p.txt",
            num_prompts=64,
            timed_prompts=timed_prompts,
            max_new_tokens=40,
            pass_repeats=1,
            seed=seed,
        )
        return measure_models(self.target, self.draft, PROMPTS, config)


def expected_best(found: Measurement) -> int:
    return gamma_of(max(found.blocks, key=EXPECTED.value))


def test_a_wrong_prediction_is_put_right_by_timing(monkeypatch: pytest.MonkeyPatch):
    """Drafting takes five times what its passes took alone: gamma 8 loses, half of it gains."""
    clock = Clock(monkeypatch, draft_s=5)
    found = clock.measure()
    assert found.requests is not None
    best, chosen = expected_best(found), gamma_of(found.requests)
    rate = FIGURES["decoding_tokens_per_s"]
    tried = {gamma_of(row): rate.value(row) for row in found.tried}
    assert chosen < best
    assert tried[chosen] > tried[best]
    gains = found.figure("speedup", found.requests).value > 1
    assert found.best_gamma == (chosen if gains else 0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_luck_with_a_few_texts_does_not_choose(monkeypatch: pytest.MonkeyPatch, seed: int):
    """Blocks cost what was expected; four requests alone give tau within 10% or so."""
    found = Clock(monkeypatch, draft_s=1).measure(timed_prompts=16, seed=100 * seed)
    assert found.requests is not None
    expected = {gamma_of(row): EXPECTED.value(row) for row in found.blocks}
    assert expected[gamma_of(found.requests)] > 0.995 * max(expected.values())


def test_requests_that_chose_are_not_among_those_that_are_reported(monkeypatch: pytest.MonkeyPatch):
    clock, asked = Clock(monkeypatch, draft_s=1), list[tuple[int, tuple[int, ...], int]]()
    original = latency.time_request

    def spy(decoder, prompt, max_new_tokens, seed):
        asked.append((getattr(decoder, "gamma", 0), tuple(prompt), seed))
        return original(decoder, prompt, max_new_tokens, seed)

    monkeypatch.setattr(latency, "time_request", spy)
    found = clock.measure(timed_prompts=16)
    assert found.requests is not None
    assert len(found.requests.units) == 12
    assert [row.totals["num_requests"] for row in found.tried] == [4, 4, 2]
    # 3 + 3 + 2 + 2 to choose, then 12 pairs: two more than 16 pairs take
    assert len(asked) == 34
    assert {gamma for gamma, _, _ in asked[10:]} == {0, gamma_of(found.requests)}
    for part in (1, 2):  # neither a prompt nor a seed is used for both
        assert not {one[part] for one in asked[:10]} & {one[part] for one in asked[10:]}


@pytest.mark.slow
def test_every_gamma_is_tried_where_the_texts_fill_the_context(monkeypatch: pytest.MonkeyPatch):
    clock = Clock(monkeypatch, draft_s=5)
    seconds = {gamma: 5.0 * gamma for gamma in range(1, 9)}
    clock.costs = replace(clock.costs, drafting_s=seconds)
    tried = list(map(gamma_of, clock.measure(timed_prompts=16).tried))
    assert len(tried) == 3
    clock.target.max_length = 3 + 40
    assert list(map(gamma_of, clock.measure(timed_prompts=16).tried)) == tried


def test_few_requests_time_the_expected_best_alone(monkeypatch: pytest.MonkeyPatch):
    found = Clock(monkeypatch, draft_s=5).measure(timed_prompts=8)
    assert found.requests is not None
    assert found.tried == []
    assert len(found.requests.units) == 8
    assert gamma_of(found.requests) == expected_best(found)
