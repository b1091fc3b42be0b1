"""Effects of frontier tests: quality of families of decoding settings at equal cost."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple

from paceline.bench.comparison import ACCEPTED, CALLS_SAVED, Cost, Group
from paceline.bench.measured_frontier import Frontier
from paceline.bench.quality_curves import compare_curves
from paceline.bench.schema import ExampleRow, ResultRow
from paceline.core.bootstrap import LEAST_UNITS
from paceline.decode.strategies import Autoregressive
from paceline.errors import UsageError
from paceline.studies.evidence import select
from paceline.studies.rows import StudyRow, pooled

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.core.bootstrap import Interval
    from paceline.decode.strategies import DecodingConfig
    from paceline.studies.claim_file import FrontierTest

_NUM_RESAMPLES = 10_000  # intervals of claims are wide: their tails need many
_COSTS: dict[str, Cost] = {"accepted": ACCEPTED, "calls_saved": CALLS_SAVED}


class PairEffect(NamedTuple):
    """One pair of families.

    Attributes:
        interval: First - second, for a claim on this pair alone.
        strict: The same, for a claim that any of the pairs can contradict.
    """

    first: str
    second: str
    interval: Interval
    strict: Interval
    first_value: float
    second_value: float


class FrontierEffect(NamedTuple):
    """All pairs of a frontier test that can be compared.

    Attributes:
        pairs: The pairs.
        num_missing: Number of pairs with a family without cells, or without a cost in common.
        num_units: Number of examples.
    """

    pairs: tuple[PairEffect, ...]
    num_missing: int
    num_units: int


def frontier_effect(
    test: FrontierTest, rows: Sequence[StudyRow], tail: float
) -> FrontierEffect | None:
    """Compare every first family with every second one.

    None if no pair can be compared, or on too few examples.

    Raises:
        UsageError: the rows are of several temperatures, tasks or pairs of models, or of different
            examples.
    """
    frontier = frontier_of(select(rows, test.rows), _NUM_RESAMPLES)
    if frontier is None or frontier.num_examples < LEAST_UNITS:
        return None
    groups = [(Group(a), Group(b)) for a, b in itertools.product(test.firsts, test.seconds)]
    pairs: list[PairEffect] = []
    for first, second in groups:
        found = compare_curves(frontier, first, second, _COSTS[test.at_equal], len(groups), tail)
        if found is not None:
            pairs.append(
                PairEffect(
                    first.name,
                    second.name,
                    found.difference,
                    found.strict,
                    found.first.value.value,
                    found.second.value.value,
                )
            )
    if not pairs:
        return None
    return FrontierEffect(tuple(pairs), len(groups) - len(pairs), frontier.num_examples)


def frontier_of(rows: Sequence[StudyRow], num_resamples: int) -> Frontier | None:
    """The frontier of the cells among these rows; None if the target alone is not among them.

    Raises:
        UsageError: the cells are of several temperatures, tasks, pairs or parts of a study.
    """
    cells: dict[str, list[StudyRow]] = {}
    for row in rows:
        if row.decoding is not None:
            cells.setdefault(row.decoding.model_dump_json(), []).append(row)
    found = [pooled(group) for group in cells.values()]
    targets = [row for row in found if row.decoding and _is_target(row.decoding)]
    if not targets:
        return None
    for key in ("temperature", "task", "pair", "part", "draft"):
        values = {row.setting.get(key) for row in found}
        if len(values) > 1:
            raise UsageError(
                f"a frontier test matches rows with several values of {key}, "
                f"{', '.join(map(str, sorted(values, key=str)))}; name one in rows"
            )
    units = targets[0].units
    for row in found:
        if row.population != targets[0].population or set(row.units) != set(units):
            raise UsageError(
                f"settings of a frontier measure different examples of {row.population}; run the "
                "study again, so that all have the same looks"
            )
    return Frontier([_result_row(row, units) for row in found], num_resamples=num_resamples)


def _is_target(decoding: DecodingConfig) -> bool:
    return isinstance(decoding.strategy, Autoregressive)


def _result_row(row: StudyRow, units: Sequence[int]) -> ResultRow:
    """The row of a cell without its text: rows of studies count tokens and do not keep them.

    Its examples are in the order of `units`, because cells are resampled together.
    """
    assert row.decoding is not None, "the caller checks it"
    counts = row.sums
    places = {unit: place for place, unit in enumerate(row.units)}

    def example(place: int) -> ExampleRow:
        def count(name: str) -> int:
            return int(counts[name][place] or 0)

        return ExampleRow(
            tokens=(0,) * count("tokens"),
            score=counts["score"][place],
            seconds=0.0,
            first_seconds=0.0,
            baseline=None,
            num_target_calls=count("calls"),
            num_drafted=count("examined"),
            num_examined=count("examined"),
            num_rejected=count("rejected"),
            num_first_tokens=0,
            num_prefill_tokens=count("prefill_tokens"),
        )

    examples = tuple(example(places[unit]) for unit in units)
    return ResultRow(
        key=row.decoding.model_dump_json(),
        context=row.study,
        decoding=row.decoding,
        metric="score",
        status="done",
        examples=examples,
    )
