"""Effects of frontier tests: families of decoding settings compared by quality and cost."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from paceline.core.bootstrap import LEAST_UNITS, Interval, percentile_interval
from paceline.errors import UsageError
from paceline.results.comparison import (
    ACCEPTED,
    CALLS_SAVED,
    SPEEDUP,
    AtQuality,
    Group,
    QualityAt,
    Width,
    compare_curves,
)
from paceline.results.comparison import compare as compare_best
from paceline.results.frontier import TARGET_ALONE, Frontier, family_of
from paceline.results.row import pooled
from paceline.studies.evidence import Evidence, Part, select

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline.results.comparison import Comparison, Cost
    from paceline.results.row import Row
    from paceline.studies.claim_file import Condition, FrontierTest

_NUM_RESAMPLES = 10_000  # intervals of claims are wide: their tails need many
_COSTS: dict[str, Cost] = {"accepted": ACCEPTED, "calls": CALLS_SAVED, "time": SPEEDUP}
_LEAST_TIMED = 40  # half of them choose cells, and fewer than 20 do not show rare differences
LEAST_OVERLAP = 0.6
"""Curves that share less of their costs, as a part of the longer curve, get no verdict."""


def frontier_evidence(test: FrontierTest, rows: Sequence[Row]) -> Evidence | None:
    """Compare every first family with every second one; None if there are too few examples.

    Evidence without parts: no pair has a verdict.

    Raises:
        UsageError: the rows are of several temperatures, tasks or pairs of models, or of different
            examples; no family has settings; or too few requests are timed.
    """
    conditions = [test.rows | test.plus, *([test.rows | test.minus] if test.minus else [])]
    chosen = [
        [_of_side(select(rows, where), side) for side in (test.first_where, test.second_where)]
        for where in conditions
    ]
    units = _shared([side for sides in chosen for side in sides])
    names = {family_of(row) for row in rows}
    for side in zip(*test.pairs, strict=True):
        if not any(Group(one).has(name) for one in side for name in names):
            raise UsageError(f"no rows of {', '.join(side)}")
    frontiers: list[tuple[Frontier, Frontier]] = []
    for first, second in chosen:
        one, two = (_kept_frontier(side, units) for side in (first, second))
        if one is None or two is None or one.num_examples < LEAST_UNITS:
            return None
        frontiers.append((one, two))
    if test.cost == "time" and frontiers[0][0].num_timed < _LEAST_TIMED:
        raise UsageError(
            f"{frontiers[0][0].num_timed} requests of a setting are timed, {_LEAST_TIMED} are "
            "needed; raise num_timed of the bench"
        )
    parts: list[Part] = []
    missing: list[str] = []
    for first, second in test.pairs:
        found = _part(test, frontiers, Group(first), Group(second))
        if isinstance(found, Part):
            parts.append(found)
        else:
            missing.append(found)
    problem = ""
    if missing:
        problem = f"{len(missing)} of {len(test.pairs)} pairs have no verdict: {missing[0]}"
    return Evidence(tuple(parts), 1 if test.some else len(parts), problem)


def _part(
    test: FrontierTest, frontiers: Sequence[tuple[Frontier, Frontier]], first: Group, second: Group
) -> Part | str:
    """The effect of a pair of families, or why there is none."""
    found = [_compared(test, one, two, first, second) for one, two in frontiers]
    name = first.name if first == second else f"{first.name} against {second.name}"
    there = [one for one in found if one is not None]
    if len(there) < len(found):
        return f"{name}: a family has no settings, or they share no cost"
    overlap = min(one.overlap for one in there)
    if overlap < LEAST_OVERLAP:
        return f"{name}: the curves share {overlap:.0%} of their costs"
    # two families whose best setting is lossless decoding are equal at 1, which is a result
    is_tie = test.statistic == "quality_at_cost" and there[0].first > 0
    if all(one.is_untried for one in there) and not is_tie:
        return f"{name}: no setting but lossless decoding reaches the quality"
    difference_R = there[0].difference_R
    for other in there[1:]:
        difference_R = difference_R - other.difference_R
    note = f"the curves share {overlap:.0%} of their costs" if test.statistic == "curve" else ""

    @functools.cache
    def at(tail: float) -> Interval:
        return percentile_interval(difference_R, tail)

    values = [
        sum(
            sign * (one.first if side == 0 else one.second)
            for one, sign in zip(there, (1, -1), strict=False)
        )
        for side in (0, 1)
    ]
    return Part(name, at, values[0], values[1], frontiers[0][0].num_examples, note=note)


def _compared(
    test: FrontierTest, one: Frontier, two: Frontier, first: Group, second: Group
) -> Comparison | None:
    cost = _COSTS[test.cost]
    match test.statistic:
        case "curve":
            return compare_curves(one, first, second, cost, two)
        case "cost_at_quality":
            statistic = AtQuality(cost, test.floor)
        case "quality_at_cost":
            statistic = QualityAt(cost, cost.alone)
        case "quality_at_low_cost":
            statistic = QualityAt(cost, None)
        case "width":
            statistic = Width(cost)
    return compare_best(one, first, second, statistic, two)


_kept: dict[tuple[object, ...], tuple[Sequence[Row], Frontier | None]] = {}
_NUM_KEPT = 3  # the claims of a paper come by statistic, and then by task


def _kept_frontier(rows: Sequence[Row], units: frozenset[int] | None) -> Frontier | None:
    """The frontier of these row objects; the last ones are kept, because claims share them."""
    key = (units, *map(id, rows))
    if key not in _kept:
        while len(_kept) >= _NUM_KEPT:
            del _kept[next(iter(_kept))]
        _kept[key] = rows, frontier_of(rows, _NUM_RESAMPLES, units)  # objects stay, so do ids
    return _kept[key][1]


def _of_side(rows: Sequence[Row], where: Mapping[str, Condition]) -> list[Row]:
    """The rows of one side; a row without a setting, such as the target alone, is of both."""
    return [
        row
        for row in rows
        if select([row], {key: value for key, value in where.items() if key in row.setting})
    ]


def _shared(sides: Sequence[Sequence[Row]]) -> frozenset[int] | None:
    """The examples that all sides have; None if they are all examples of each."""
    units = [frozenset(unit for row in rows for unit in row.units) for rows in sides]
    return None if len(set(units)) == 1 else frozenset.intersection(*units)


def frontier_of(
    rows: Sequence[Row], num_resamples: int, units: frozenset[int] | None = None
) -> Frontier | None:
    """The frontier of the cells among these rows; None if the target alone is not among them.

    `units`: only these examples; None: all.

    Raises:
        UsageError: the cells are of several temperatures, tasks, pairs or parts of a study.
    """
    cells: dict[str, list[Row]] = {}
    for row in rows:
        if family_of(row):
            cells.setdefault(str(sorted(row.setting.items())), []).append(row)
    found = [pooled(group) for group in cells.values()]
    targets = [row for row in found if family_of(row) == TARGET_ALONE]
    if not targets:
        return None
    for key in ("temperature", "task", "pair", "part", "draft"):
        values = {row.setting.get(key) for row in found}
        if len(values) > 1:
            raise UsageError(
                f"a frontier test matches rows with several values of {key}, "
                f"{', '.join(map(str, sorted(values, key=str)))}; name one in rows"
            )
    for row in found:
        if row.population != targets[0].population or set(row.units) != set(targets[0].units):
            raise UsageError(
                f"settings of a frontier measure different examples of {row.population}; give "
                "their stages the same examples and run the study again"
            )
    kept = [unit for unit in targets[0].units if units is None or unit in units]
    return Frontier([row.only(kept) for row in found], num_resamples=num_resamples)
