"""Frontier claims on rows of studies: what the comparison of a bench's cells finds."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from paceline.config import validate
from paceline.core.rules import Chow, Lossless, Lossy, Opt
from paceline.errors import UsageError
from paceline.results.comparison import (
    ACCEPTED,
    CALLS_SAVED,
    AtQuality,
    Group,
    QualityAt,
    compare,
    compare_curves,
)
from paceline.results.frontier import Frontier
from paceline.results.row import Row
from paceline.studies.claim_file import FrontierTest
from paceline.studies.evidence import Evidence
from paceline.studies.evidence_of_frontiers import frontier_evidence
from support.results import ALONE, example, row, study_row

COSTS = {"accepted": ACCEPTED, "calls": CALLS_SAVED}


def wanted(**changes: Any) -> FrontierTest:
    values = {"statistic": "curve", "cost": "calls", "firsts": ["opt"], "seconds": ["chow"]}
    return validate(FrontierTest, values | {"matters": 0.05} | changes)


def cells(count: int = 30) -> list[Row]:
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


def wide_cells() -> list[Row]:
    """Families whose costs overlap by more than half."""
    found = [row(ALONE, [example(1.0, calls=10)] * 30)]
    draws = torch.Generator().manual_seed(4)
    for rules in ((Opt(0.1), Opt(0.3)), (Chow(0.2), Chow(0.6)), (Lossy(0.2), Lossy(0.9))):
        for number, rule in enumerate(rules):
            scores = (0.7 + 0.3 * torch.rand(30, generator=draws)).tolist()
            counts = torch.randint(0, 3, (30,), generator=draws).tolist()
            cost = [2 + 4 * number + count for count in counts]
            parts = zip(scores, cost, strict=True)
            found.append(row(rule, [example(s, calls=c, examined=9, rejected=c) for s, c in parts]))
    return found


def as_study_row(cell: Row, units: Sequence[int] | None = None, **setting: Any) -> Row:
    """Of these examples of the cell, with more settings; a study keeps no prediction and no key."""
    chosen = cell if units is None else cell.only(units)
    values = chosen.setting | setting
    return study_row(chosen.sums, chosen.units, **values)


def found_by(test: FrontierTest, rows: Sequence[Row]) -> Evidence:
    found = frontier_evidence(test, rows)
    assert found is not None
    return found


@pytest.mark.parametrize("cost", COSTS)
def test_a_frontier_claim_compares_the_curves_of_the_bench(cost: str):
    seconds = ["chow", "lossy beta 1.0"]
    rows = list(map(as_study_row, wide_cells()))
    found = found_by(wanted(cost=cost, seconds=seconds), rows)
    assert (found.missing, found.rank) == ("", 2)
    frontier = Frontier(wide_cells(), num_resamples=10_000)
    for part, second in zip(found.parts, seconds, strict=True):
        expected = compare_curves(frontier, Group("opt"), Group(second), COSTS[cost])
        assert expected is not None
        assert part.at(0.01) == expected.difference(0.01)
        assert part.name == f"opt against {second}"
        assert part.note == f"the curves share {expected.overlap:.0%} of their costs"
        assert (part.first, part.second) == (expected.first, expected.second)


@pytest.mark.parametrize(
    ("changes", "statistic"),
    [
        (
            {"statistic": "cost_at_quality", "floor": 0.8},
            AtQuality(CALLS_SAVED, 0.8),
        ),
        ({"statistic": "quality_at_cost"}, QualityAt(CALLS_SAVED, 0.0)),
        (
            {"statistic": "quality_at_low_cost", "cost": "accepted"},
            QualityAt(ACCEPTED, None),
        ),
    ],
)
def test_the_statistics_of_table_2_are_those_of_the_bench(
    changes: dict[str, Any], statistic: AtQuality | QualityAt
):
    found = found_by(wanted(**changes), list(map(as_study_row, cells())))
    frontier = Frontier(cells(), num_resamples=10_000)
    expected = compare(frontier, Group("opt"), Group("chow"), statistic)
    assert expected is not None
    assert found.parts[0].at(0.01) == expected.difference(0.01)


def test_families_whose_best_setting_is_lossless_decoding_are_equal():
    made = [row(ALONE, [example(1.0, calls=10)] * 30), row(Lossless(), [example(calls=5)] * 30)]
    made += [row(rule, [example(0.8, calls=4)] * 30) for rule in (Opt(0.1), Chow(0.2))]
    found = found_by(wanted(statistic="quality_at_cost"), list(map(as_study_row, made)))
    (part,) = found.parts
    assert (part.first, part.second, *part.at(0.01)) == (1.0, 1.0, 0.0, 0.0, 0.0)


def test_curves_that_share_little_get_no_verdict():
    """Rejections of opt are 0 to 20% of those examined, of chow 15% to 90%: 6% of chow's range."""
    spread = {Opt(0.1): 0, Opt(0.3): 2, Chow(0.2): 2, Chow(0.6): 9}
    made = [row(ALONE, [example(1.0, calls=10)] * 30)]
    made += [
        row(rule, [example(0.8, calls=5, examined=10, rejected=n)] * 30)
        for rule, n in spread.items()
    ]
    found = found_by(wanted(cost="accepted"), list(map(as_study_row, made)))
    assert found.parts == ()
    assert found.missing.startswith("1 of 1 pairs have no verdict: opt against chow")


def test_a_family_is_compared_with_itself_in_rows_of_another_draft():
    """The second draft's texts are worse by 0.1 at the same calls."""

    def of(draft: str, loss: float) -> list[Row]:
        made = [
            row(rule, [example(0.8 - loss + n / 100, calls=c) for n in range(20)])
            for rule, c in ((Chow(0.2), 4), (Chow(0.6), 6))
        ]
        return [as_study_row(one, draft=draft) for one in made]

    alone = as_study_row(row(ALONE, [example(1.0, calls=10)] * 20))
    test = wanted(
        firsts=["chow"],
        seconds=[],
        itself=True,
        first_where={"draft": "new"},
        second_where={"draft": "old"},
    )
    rows = [*of("new", 0.0), *of("old", 0.1)]
    assert frontier_evidence(test, rows) is None
    named = [
        alone.model_copy(update={"setting": alone.setting | {"draft": d}}) for d in ("new", "old")
    ]
    found = found_by(test, [*rows, *named])
    assert found.parts[0].name == "chow"
    assert found.parts[0].at(0.01).value == pytest.approx(0.1)


def test_the_effect_at_other_rows_is_subtracted():
    """At T=1 opt is better by 0.2, at T=0 by 0.1; only the examples of both count."""
    made: list[Row] = []
    for temperature, gain, count in ((1.0, 0.2, 30), (0.0, 0.1, 20)):
        for rule, score in ((Opt(0.1), 0.5 + gain), (Chow(0.2), 0.5)):
            cell = row(rule, [example(score, calls=5)] * count)
            made.append(as_study_row(cell, temperature=temperature))
        alone = row(ALONE, [example(1.0, calls=10)] * count)
        made.append(as_study_row(alone, temperature=temperature))
    test = wanted(
        statistic="quality_at_cost", plus={"temperature": 1.0}, minus={"temperature": 0.0}
    )
    part = found_by(test, made).parts[0]
    assert part.at(0.01).value == pytest.approx(0.1)
    assert part.num_units == 20


def test_a_width_is_the_range_of_costs_of_the_same_settings():
    def of(gamma: int, calls: tuple[int, int]) -> list[Row]:
        made = [
            row(rule, [example(0.5, calls=c)] * 20)
            for rule, c in zip((Chow(0.2), Chow(0.6)), calls, strict=True)
        ]
        return [as_study_row(one, gamma=gamma) for one in made]

    alone = as_study_row(row(ALONE, [example(1.0, calls=10)] * 20))
    test = wanted(statistic="width", firsts=["chow"], seconds=[], itself=True)
    sides = {"first_where": {"gamma": 7}, "second_where": {"gamma": 3}}
    test = wanted(**(test.model_dump() | sides))
    part = found_by(test, [alone, *of(7, (2, 8)), *of(3, (4, 7))]).parts[0]
    assert part.at(0.01).value == pytest.approx(0.6 - 0.3)


def test_times_of_few_requests_are_no_measurement():
    rows = [
        row_.model_copy(
            update={
                "sums": row_.sums
                | dict.fromkeys(("seconds", "target_seconds", "target_tokens"), (1.0,) * 30)
            }
        )
        for row_ in map(as_study_row, cells())
    ]
    with pytest.raises(UsageError, match="30 requests of a setting are timed, 40 are needed"):
        frontier_evidence(wanted(statistic="cost_at_quality", cost="time"), rows)


def test_parts_are_one_frontier_whatever_the_order_of_their_examples():
    """Cells are resampled together, so an example has the same place in all of them."""
    whole = found_by(wanted(), list(map(as_study_row, cells()))).parts[0].at(0.01)
    parts = [as_study_row(cell, part) for cell in cells() for part in (range(12), range(12, 30))]
    turned = [as_study_row(cell, range(29, -1, -1)) for cell in cells()[1:]]
    assert found_by(wanted(), parts).parts[0].at(0.01) == whole
    rows = [as_study_row(cells()[0]), *turned]
    assert found_by(wanted(), rows).parts[0].at(0.01) == whole


def test_families_without_a_cell_are_counted():
    rows = list(map(as_study_row, cells()))
    with pytest.raises(UsageError, match="no rows of token_v2"):
        frontier_evidence(wanted(firsts=["token_v2"]), rows)
    test = wanted(seconds=["chow", "token_v1"], statistic="quality_at_cost")
    found = found_by(test, rows)
    assert [part.name for part in found.parts] == ["opt against chow"]
    assert found.missing == (
        "1 of 2 pairs have no verdict: opt against token_v1: a family has no settings, or they "
        "share no cost"
    )


def test_without_the_target_alone_or_with_few_examples_there_is_no_frontier():
    assert frontier_evidence(wanted(), [as_study_row(cell) for cell in cells()[1:]]) is None
    assert frontier_evidence(wanted(), list(map(as_study_row, cells(7)))) is None


@pytest.mark.parametrize("key", ["temperature", "task", "pair"])
def test_rows_of_several_temperatures_tasks_or_pairs_are_refused(key: str):
    rows = [as_study_row(cell, **{key: 0.5}) for cell in cells()]
    other = row(Opt(0.5), [example()] * 30)
    rows.append(as_study_row(other, **{key: 0.7}))
    with pytest.raises(UsageError, match=rf"several values of {key}, 0\.5, 0\.7; name one in rows"):
        frontier_evidence(wanted(), rows)
    assert frontier_evidence(wanted(rows={key: 0.5}), rows) is not None


def test_cells_of_other_examples_are_refused():
    rows = list(map(as_study_row, cells()))
    rows[2] = as_study_row(cells()[2], range(20))
    with pytest.raises(UsageError, match="settings of a frontier measure different examples"):
        frontier_evidence(wanted(), rows)
