"""Frontier claims on rows of studies: what the comparison of a bench's cells finds."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from paceline.bench.comparison import ACCEPTED, CALLS_SAVED, Group
from paceline.bench.measured_frontier import Frontier
from paceline.bench.quality_curves import compare_curves
from paceline.bench.schema import ResultRow
from paceline.config import validate
from paceline.core.rules import Chow, Lossy, Opt
from paceline.errors import UsageError
from paceline.studies.claim_file import FrontierTest
from paceline.studies.frontier_evidence import frontier_effect
from paceline.studies.rows import StudyRow
from result_rows import ALONE, example, row
from study_rows import study_row

COSTS = {"accepted": ACCEPTED, "calls_saved": CALLS_SAVED}


def wanted(**changes: Any) -> FrontierTest:
    values = {"at_equal": "accepted", "firsts": ["opt"], "seconds": ["chow", "lossy beta 1.0"]}
    return validate(FrontierTest, values | {"matters": 0.05} | changes)


def cells(count: int = 30) -> list[ResultRow]:
    """The target alone, and cells of three families with random scores and counts."""
    draws = torch.Generator().manual_seed(3)
    rules = [Opt(0.1), Opt(0.3), Chow(0.2), Chow(0.4), Chow(0.6), Lossy(0.2), Lossy(0.9)]
    found = [row(ALONE, [example(1.0, calls=10)] * count)]
    for number, rule in enumerate(rules):
        scores = (0.8 + 0.4 * torch.rand(count, generator=draws)).clamp(max=1).tolist()
        calls = torch.randint(1 + number % 2, 6 + number % 2, (count,), generator=draws).tolist()
        rejected = torch.randint(0, 5, (count,), generator=draws).tolist()
        parts = zip(scores, calls, rejected, strict=True)
        found.append(row(rule, [example(s, calls=c, examined=9, rejected=r) for s, c, r in parts]))
    return found


def as_study_row(cell: ResultRow, units: Sequence[int] | None = None, **setting: Any) -> StudyRow:
    units = range(len(cell.examples)) if units is None else units
    chosen = [cell.examples[unit] for unit in units]
    sums = {
        "score": [one.score for one in chosen],
        "tokens": [float(len(one.tokens)) for one in chosen],
        "prefill_tokens": [float(one.num_prefill_tokens) for one in chosen],
        "calls": [float(one.num_target_calls) for one in chosen],
        "examined": [float(one.num_examined) for one in chosen],
        "rejected": [float(one.num_rejected) for one in chosen],
    }
    return study_row(sums, units, decoding=cell.decoding, **({"temperature": 1.0} | setting))


@pytest.mark.parametrize("cost", COSTS)
def test_a_frontier_claim_compares_the_curves_of_the_bench(cost: str):
    found = frontier_effect(wanted(at_equal=cost), list(map(as_study_row, cells())), 0.01)
    assert found is not None
    assert (found.num_missing, found.num_units) == (0, 30)
    for pair, second in zip(found.pairs, ("chow", "lossy beta 1.0"), strict=True):
        frontier = Frontier(cells(), num_resamples=10_000)
        expected = compare_curves(frontier, Group("opt"), Group(second), COSTS[cost], 2, 0.01)
        assert expected is not None
        assert (pair.interval, pair.strict) == (expected.difference, expected.strict)
        assert pair.first_value == expected.first.value.value
        assert pair.second_value == expected.second.value.value


def test_looks_are_one_frontier_whatever_the_order_of_their_examples():
    """Cells are resampled together, so an example has the same place in all of them."""
    whole = frontier_effect(wanted(), list(map(as_study_row, cells())), 0.01)
    parts = [as_study_row(cell, part) for cell in cells() for part in (range(12), range(12, 30))]
    turned = [as_study_row(cell, range(29, -1, -1)) for cell in cells()[1:]]
    assert frontier_effect(wanted(), parts, 0.01) == whole
    assert frontier_effect(wanted(), [as_study_row(cells()[0]), *turned], 0.01) == whole


def test_families_without_a_cell_are_counted():
    rows = list(map(as_study_row, cells()))
    found = frontier_effect(wanted(seconds=["chow", "token_v1"]), rows, 0.01)
    assert found is not None
    assert ([pair.second for pair in found.pairs], found.num_missing) == (["chow"], 1)
    assert frontier_effect(wanted(firsts=["token_v2"]), rows, 0.01) is None


def test_without_the_target_alone_or_with_few_examples_there_is_no_frontier():
    assert frontier_effect(wanted(), [as_study_row(cell) for cell in cells()[1:]], 0.01) is None
    assert frontier_effect(wanted(), list(map(as_study_row, cells(7))), 0.01) is None


@pytest.mark.parametrize("key", ["temperature", "task", "pair"])
def test_rows_of_several_temperatures_tasks_or_pairs_are_refused(key: str):
    rows = [as_study_row(cell, **{key: 0.5}) for cell in cells()]
    rows.append(as_study_row(row(Opt(0.5), cells()[1].examples), **{key: 0.7}))
    with pytest.raises(UsageError, match=rf"several values of {key}, 0\.5, 0\.7; name one in rows"):
        frontier_effect(wanted(), rows, 0.01)
    assert frontier_effect(wanted(rows={key: 0.5}), rows, 0.01) is not None


def test_cells_of_other_examples_are_refused():
    rows = list(map(as_study_row, cells()))
    rows[2] = as_study_row(cells()[2], range(20))
    with pytest.raises(UsageError, match="settings of a frontier measure different examples"):
        frontier_effect(wanted(), rows, 0.01)
