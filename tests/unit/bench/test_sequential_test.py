"""What tune asks of a setting: order of the tests, confidence limits, and too few examples."""

from typing import Any

import pytest
from scipy import stats

from paceline.bench.sequential_test import Bound, Step, Tried, confirm, statement
from paceline.bench.tune import TuneConfig
from paceline.config import validate
from paceline.core.rules import Chow, Lossless
from paceline.decode.strategies import DecodingConfig, Speculative
from paceline.errors import ConfigError
from paceline.results.frontier import Frontier
from paceline.results.row import Row
from support.engines import costs_of, step
from support.results import ALONE, example, row, steady, with_sums


def asked(**changes: Any) -> TuneConfig:
    values = {"target": "t", "draft": "d", "task": "arithmetic", "output": "o", "num_confirmed": 8}
    return validate(TuneConfig, values | changes)


def frontier_of(**cells: Row) -> Frontier:
    return Frontier([steady(ALONE), *cells.values()])


def names(order: list[Row], **cells: Row) -> list[str]:
    return [next((name for name, cell in cells.items() if cell is one), "alone") for one in order]


def tried_in(bound: Bound, frontier: Frontier, row: Row, examples: Step = "confirming") -> Tried:
    return bound.tried(frontier, row, DecodingConfig(), examples)


def test_what_needs_no_test_comes_first_and_then_only_what_is_better():
    """At temperature 0 lossless decoding and the target alone have one and the same quality."""
    cells = {
        "lossless": steady(Lossless(), 1.0, 1.3),
        "slower": steady(Chow(0.1), 1.0, 1.1),
        "faster": steady(Chow(0.2), 0.95, 1.5),
        "worse": steady(Chow(0.9), 0.5, 2.0),
    }
    frontier = frontier_of(**cells)
    budget = Bound(asked(max_latency=1.0, num_timed=None))
    assert names(budget.test_order(frontier), **cells) == ["alone", "lossless"]
    floor = Bound(asked(quality_floor=0.9))
    assert names(floor.test_order(frontier), **cells) == ["lossless", "faster"]


def test_settings_are_tested_from_the_surest_to_the_least_sure_one():
    """All are at least 0.9 of the target in the data; of three as sure the fastest comes first."""
    cells = {
        "sure": steady(Chow(0.1), 0.95, 1.2),
        "as sure": steady(Chow(0.2), 0.95, 1.1),
        "fast": row(Chow(0.3), [example(1.0, 0.5)] * 19 + [example(0.2, 0.5)]),
        "slow and unsure": row(Chow(0.4), [example(1.0, 0.9)] * 19 + [example(0.0, 0.9)]),
        "fastest": row(Chow(0.5), [example(1.0, 0.4)] * 18 + [example(0.0, 0.4)] * 2),
    }
    floor = Bound(asked(quality_floor=0.9))
    order = names(floor.test_order(frontier_of(**cells)), **cells)
    assert order == ["alone", "sure", "fast", "fastest"]


def tried(met: bool, limit: float | None = 0.5) -> Tried:
    totals = {} if limit is None else {"lower_limit": limit}
    words = "no" if not met else "by proof" if limit is None else "yes"
    cell = steady(Chow(0.1)).extended({}, totals, examples="confirming", met=words)
    return Tried(decoding=DecodingConfig(), row=cell)


def test_testing_ends_with_the_first_setting_that_fails():
    given = [DecodingConfig(strategy=Speculative(rule=Chow(a / 10))) for a in range(5)]
    passes = dict(zip(map(repr, given), [True, None, True, False, True], strict=True))
    asked: list[DecodingConfig] = []

    def test(decoding: DecodingConfig) -> Tried | None:
        asked.append(decoding)
        met = passes[repr(decoding)]
        return None if met is None else tried(met)

    assert [one.met for one in confirm(given, test)] == [True, True, False]
    assert asked == given[:4]


def test_the_statement_counts_the_tests_and_names_the_odds():
    config = asked(quality_floor=0.9, confidence=0.95)
    said = statement(config, [tried(True, None), tried(True), tried(False)])
    assert " 2 settings were tested on " in said
    assert "At most 5% of runs of tune choose a setting that misses its bound" in said
    assert "by proof" not in said
    proven = statement(config, [tried(True, None), tried(False)])
    assert "meets it by proof" in proven
    assert " 1 setting was tested on " in proven
    assert statement(config, [tried(True, None)]).endswith("meets it by proof.")
    surer = asked(quality_floor=0.9, confidence=0.999)
    assert "At most 0.1% of" in statement(surer, [tried(True)])


def test_lossless_decoding_meets_a_floor_by_proof_whatever_luck_its_samples_have():
    cells = {"lossless": steady(Lossless(), 0.5, 1.3), "chow": steady(Chow(0.1), 0.5, 1.4)}
    frontier = frontier_of(**cells)
    floor = Bound(asked(quality_floor=1.0))
    assert names(floor.test_order(frontier), **cells) == ["lossless"]
    proven = tried_in(floor, frontier, cells["lossless"])
    assert (proven.met, proven.lower_limit) == (True, None)
    more = Bound(asked(quality_floor=1.01))
    assert more.test_order(frontier) == []


def test_confirming_takes_more_than_a_lucky_mean():
    """0.99 of the target's quality in the data, below 0.988 in about every third resample."""
    lucky = row(Chow(0.2), [example(1.0, 0.5)] * 95 + [example(0.8, 0.5)] * 5)
    frontier = Frontier([steady(ALONE, count=100), lucky])
    bound = Bound(asked(quality_floor=0.988, confidence=0.8))
    assert tried_in(bound, frontier, lucky, "choosing").met
    assert not tried_in(bound, frontier, lucky).met
    low = Bound(asked(quality_floor=0.95, confidence=0.8))
    assert tried_in(low, frontier, lucky).met


def test_a_setting_that_lost_nothing_in_too_few_examples_is_not_confirmed():
    """79 right answers of 79 have probability 0.98^79 = 0.203 for a setting that keeps 0.98."""
    config = asked(quality_floor=0.98, confidence=0.8, num_confirmed=79)
    perfect = steady(Chow(0.2), 1.0, 2.0, count=79)
    frontier = Frontier([steady(ALONE, count=79), perfect])
    assert not tried_in(Bound(config), frontier, perfect).met
    plenty = steady(Chow(0.2), 1.0, 2.0, count=150)
    frontier = Frontier([steady(ALONE, count=150), plenty])
    assert tried_in(Bound(config), frontier, plenty).met


@pytest.mark.parametrize("gammas", [[4], [1, 2, 4]])
def test_a_latency_in_an_engine_is_confirmed_with_the_errors_of_its_costs(gammas: list[int]):
    """By hand: 500 equal examples leave those alone. A step and a block are known to a tenth."""
    cell = steady(Lossless(), 1.0, 2.0, count=500, gamma=4)
    cell = with_sums(cell, drafted=[40] * 500)  # 4 in each of 10 blocks
    frontier = Frontier([steady(ALONE, count=500), cell])
    wanted = asked(max_latency=1 / 1.96, confidence=0.9, num_speculative_tokens=gammas)
    exact, with_errors = Bound(wanted), Bound(wanted, costs_of(step(0, 0.010), step(4, 0.015)))
    assert tried_in(exact, frontier, cell).lower_limit == pytest.approx(2.0)
    found = tried_in(with_errors, frontier, cell)
    # the bounds are those of 95%; an error rate of 0.1 on one side is shared by the gammas
    part = stats.norm.ppf(1 - 0.1 / len(gammas)) / stats.norm.ppf(0.975)
    assert found.lower_limit == pytest.approx(2.0 * (0.9 / 1.1) ** part)
    assert tried_in(exact, frontier, cell).met
    assert not found.met


def test_a_latency_is_confirmed_by_the_timed_examples():
    """Twice as fast on every timed example; the others say nothing."""
    timed, untimed = example(seconds=0.5), example(seconds=90.0, baseline_s=None)
    cell = row(Chow(0.2), [timed] * 10 + [untimed] * 10)
    frontier = frontier_of(cell=cell)
    wanted = Bound(asked(max_latency=0.6, num_timed=10))
    found = tried_in(wanted, frontier, cell)
    assert found.lower_limit == pytest.approx(2.0)
    assert found.met
    assert not tried_in(Bound(asked(max_latency=0.4, num_timed=10)), frontier, cell).met


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"max_latency": 0.9, "num_timed": 7}, "num_timed is 7"),
        ({}, "exactly one of quality_floor"),
        ({"quality_floor": 0.9, "max_latency": 1.0, "num_timed": 8}, "exactly one"),
    ],
)
def test_fewer_examples_than_an_interval_takes_are_one_line(changes: dict[str, Any], says: str):
    with pytest.raises(ConfigError, match=says):
        asked(**changes)
