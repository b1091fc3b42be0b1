"""Statistics of two families with as many cells on either side, on rows made by hand."""

import itertools
import math

import pytest
import torch

from paceline.bench.comparison import (
    ACCEPTED,
    CALLS_SAVED,
    SPEEDUP,
    AtQuality,
    Comparison,
    Group,
    QualityAt,
    best_of,
    compare,
)
from paceline.bench.measured_frontier import Frontier
from paceline.bench.schema import ResultRow
from paceline.core.bootstrap import Interval
from paceline.core.rules import BiLDRule, Chow, ChowLog, Diff, Lossy, Opt, TokenV1
from paceline.decode.draft_policies import Confident
from paceline.decode.strategies import AnyStrategy, Oracle, Speculative, TokenByToken
from result_rows import ALONE, example, row, steady

LADDER = AtQuality("speed", "ours", SPEEDUP, (1.0, 0.98, 0.95, 0.9))


def compared(
    statistic: AtQuality | QualityAt, *cells: ResultRow, names: tuple[str, str] = ("opt", "chow")
) -> Comparison:
    alone = steady(ALONE, count=len(cells[0].examples))
    found = compare(Frontier([alone, *cells]), *map(Group, names), statistic, 1)
    assert found is not None
    return found


def test_the_expected_best_of_some_cells_is_the_mean_over_all_choices():
    values_CR = torch.rand(5, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for count in range(1, 6):
        choices = itertools.combinations(values_CR.tolist(), count)
        best = [[max(column) for column in zip(*rows, strict=True)] for rows in choices]
        expected = [sum(column) / len(best) for column in zip(*best, strict=True)]
        assert best_of(values_CR, count).tolist() == pytest.approx(expected)


def test_a_ladder_is_the_mean_of_the_best_speeds_at_the_floors():
    """At 1 only the slowest, at 0.98 too, at 0.95 the middle one, at 0.9 the fastest."""
    first = [steady(Opt(0.1), 1.0, 2.0), steady(Opt(0.5), 0.96, 3.0), steady(Opt(0.9), 0.9, 4.0)]
    second = [steady(Chow(alpha), 0.95, 1.5) for alpha in (0.1, 0.2, 0.3)]
    found = compared(LADDER, *first, *second)
    assert [one.value for one in found.first.by_floor] == pytest.approx([2.0, 2.0, 3.0, 4.0])
    assert found.first.value.value == pytest.approx((2 + 2 + 3 + 4) / 4)
    assert [one.value for one in found.second.by_floor] == pytest.approx([1.0, 1.0, 1.5, 1.5])
    assert found.difference == pytest.approx((2.75 - 1.25,) * 3)


def test_the_larger_family_counts_with_the_best_of_as_many_cells_as_the_smaller_one():
    """Of speeds 1.2, 1.4, 1.6, two at a time: the best are 1.4, 1.6 and 1.6."""
    larger = [steady(Opt(speed), 1.0, speed) for speed in (1.2, 1.4, 1.6)]
    smaller = [steady(Chow(0.1), 1.0, 1.5), steady(Chow(0.2), 1.0, 1.1)]
    found = compared(AtQuality("", "", SPEEDUP, (1.0,)), *larger, *smaller)
    assert found.num_compared == 2
    assert (found.first.num_cells, found.second.num_cells) == (3, 2)
    assert found.first.value.value == pytest.approx((1.4 + 1.6 + 1.6) / 3)
    assert found.second.value.value == pytest.approx(1.5)


@pytest.mark.slow
def test_more_cells_of_the_same_worth_are_no_advantage():
    """200 benches in which all cells are alike: six cells against two, told apart by luck alone.

    The mean difference is 0 if the numbers are made alike; at n = 200 benches it is 5 standard
    errors away from that once in 2 million. The mutant takes the best of all six cells.
    """
    draws = torch.Generator().manual_seed(5)
    fair, unfair = [], []
    statistic = AtQuality("", "", SPEEDUP, (1.0,))
    for _ in range(200):
        cells = []
        for number in range(8):
            seconds = (0.5 + 0.3 * torch.rand(20, generator=draws)).tolist()
            rule = Opt(number / 10) if number < 6 else Chow(number / 10)
            cells.append(row(rule, [example(seconds=one) for one in seconds]))
        frontier = Frontier([steady(ALONE), *cells])
        at = {count: statistic.values(frontier, cells[:6], count)[0, 0] for count in (2, 6)}
        other = statistic.values(frontier, cells[6:], 2)[0, 0]
        fair.append(float(at[2] - other))
        unfair.append(float(at[6] - other))
    spread = torch.tensor(fair).std().item() / math.sqrt(200)
    assert abs(sum(fair) / 200) < 5 * spread
    assert sum(unfair) / 200 > 5 * spread


def test_a_cell_slower_than_the_target_counts_as_the_target():
    found = compared(LADDER, steady(Opt(0.1), 1.0, 0.4), steady(Chow(0.2), 1.0, 2.0))
    assert found.first.value == Interval(1.0, 1.0, 1.0)


def test_target_calls_saved_are_counted_and_not_timed():
    """Calls a token 0.4 and 0.7; the untimed, slow answer counts as any other."""
    quick = row(
        Opt(0.1), [example(seconds=9.0, calls=4, baseline_s=None)] + [example(calls=4)] * 19
    )
    found = compared(
        AtQuality("", "", CALLS_SAVED, (1.0, 0.9)), quick, row(Chow(0.2), [example(calls=7)] * 20)
    )
    assert found.first.value.value == pytest.approx(0.6)
    assert found.difference.value == pytest.approx(0.7 - 0.4)


def test_a_family_without_the_quality_saves_no_call_and_no_rejection():
    bad = row(Opt(0.1), [example(0.5, calls=2, examined=8, rejected=1)] * 20)
    good = row(Chow(0.1), [example(1.0, calls=8, examined=10, rejected=3)] * 20)
    calls = compared(AtQuality("", "", CALLS_SAVED, (1.0,)), bad, good)
    assert (calls.first.value.value, calls.second.value.value) == pytest.approx((0.0, 0.2))
    accepted = compared(AtQuality("", "", ACCEPTED, (1.0,)), bad, good)
    assert (accepted.first.value.value, accepted.second.value.value) == pytest.approx((0.0, 0.7))


def test_quality_within_the_targets_latency_is_that_of_cells_no_slower():
    first = [steady(Opt(0.1), 1.2, 0.9), steady(Opt(0.2), 0.8, 1.0)]
    second = [steady(Chow(0.1), 1.3, 0.8), steady(Chow(0.2), 1.1, 0.5)]
    found = compared(QualityAt("", "", SPEEDUP, 1.0), *first, *second)
    assert found.first.value.value == pytest.approx(0.8)
    assert found.second.value.value == 0.0


def test_quality_at_high_speed_is_that_of_cells_at_the_upper_quartile():
    """Speeds 1, 2, 3, 4, 5 have their 75th percentile at 4; oracle and target are not asked."""
    cells = [
        steady(Chow(0.1), 1.0, 1.0),
        steady(Chow(0.2), 0.9, 2.0),
        steady(Chow(0.3), 0.8, 3.0),
        steady(Chow(0.4), 0.3, 4.0),
        steady(TokenByToken(alpha=0.9), 0.5, 5.0),
        steady(Oracle(rule=Diff(0.2)), 1.0, 9.0),
    ]
    statistic = QualityAt("", "", SPEEDUP, None)
    found = compared(statistic, *cells, names=("token_cascade", "chow"))
    assert found.first.value.value == pytest.approx(0.5)
    assert found.second.value.value == pytest.approx(0.3 / 4), "one of four cells is so fast"
    frontier = Frontier([steady(ALONE), *cells])
    assert statistic.least_gain(frontier)[0] == pytest.approx(4.0)


def test_a_family_without_a_cell_is_not_compared():
    frontier = Frontier([steady(ALONE), steady(Opt(0.1))])
    assert compare(frontier, Group("opt"), Group("chow"), LADDER, 1) is None


def test_an_interval_for_many_comparisons_is_wider():
    noisy = row(Opt(0.1), [example(seconds=0.3 + number / 50) for number in range(20)])
    frontier = Frontier([steady(ALONE), noisy, steady(Chow(0.1), 1.0, 2.0)])
    found = compare(frontier, Group("opt"), Group("chow"), LADDER, 5)
    assert found is not None
    assert found.strict.low < found.difference.low < found.difference.high < found.strict.high


CELLS: dict[str, AnyStrategy | object] = {
    "lossy": Lossy(0.2),
    "lossy tuned": Lossy(0.2, "tuned"),
    "bild": BiLDRule(1.0),
    "chow": Chow(0.2),
    "chow_log": ChowLog(0.2),
    "opt": Opt(0.2),
    "token_v1": TokenV1(0.2),
    "chow confident": Speculative(rule=Chow(0.2), policy=Confident(0.5)),
    "token_cascade": TokenByToken(alpha=0.2),
    "oracle": Oracle(rule=Opt(0.2)),
}


@pytest.mark.parametrize(
    ("name", "members"),
    [
        ("chow", ["chow", "chow confident"]),
        ("opt", ["opt"]),
        ("lossy beta 1.0", ["lossy"]),
        ("lossy beta tuned", ["lossy tuned"]),
        ("token_v1", ["token_v1"]),
        ("token_cascade", ["token_cascade"]),
    ],
)
def test_a_group_holds_its_family_whatever_its_blocks_and_no_oracle(name: str, members: list[str]):
    cells = {key: steady(strategy) for key, strategy in CELLS.items()}  # pyright: ignore
    found = Group(name).cells(Frontier([steady(ALONE), *cells.values()]))
    assert [key for key, cell in cells.items() if cell in found] == members


def test_a_family_is_not_of_the_group_whose_name_it_only_begins_with():
    has = [Group("lossy beta 1.0").has(name) for name in ("lossy beta 1.0", "lossy beta 1.05")]
    assert has == [True, False]
