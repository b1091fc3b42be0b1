"""Effects of frontier tests: families of decoding settings at equal quality or equal cost."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple

from paceline.bench.comparison import (
    ACCEPTED,
    CALLS_SAVED,
    AtQuality,
    Group,
    QualityAt,
    compare,
)
from paceline.bench.measured_frontier import Frontier
from paceline.bench.schema import ExampleRow, ResultRow
from paceline.decode.strategies import Autoregressive
from paceline.errors import UsageError
from paceline.studies.evidence import select
from paceline.studies.rows import StudyRow, pooled

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.bench.comparison import Statistic
    from paceline.core.bootstrap import Interval
    from paceline.studies.claim_file import FrontierTest

FLOORS = (1.0, 0.98, 0.95, 0.9)
_NUM_RESAMPLES = 10_000  # intervals of claims are wide: their tails need many
_STATISTICS: dict[str, Statistic] = {
    "accepted": AtQuality("1 - rejection rate", "", ACCEPTED, FLOORS),
    "calls_saved": AtQuality("target calls saved per token", "", CALLS_SAVED, FLOORS),
    "quality_at_few_calls": QualityAt("quality at few target calls", "", CALLS_SAVED, None),
}


class PairEffect(NamedTuple):
    """One pair of families.

    Attributes:
        interval: First - second, for a claim on this pair alone.
        strict: The same, for a claim that any of the pairs can contradict.
        is_untried: Neither family reaches the condition.
    """

    first: str
    second: str
    interval: Interval
    strict: Interval
    first_value: float
    second_value: float
    is_untried: bool


class FrontierEffect(NamedTuple):
    """All pairs of a frontier test that were measured."""

    pairs: tuple[PairEffect, ...]
    num_missing: int
    num_units: int


def frontier_effect(
    test: FrontierTest, rows: Sequence[StudyRow], tail: float
) -> FrontierEffect | None:
    """Compare every first family with every second one; None if no pair was measured.

    Raises:
        UsageError: the rows are of several temperatures, tasks or pairs of models.
    """
    frontier = frontier_of(select(rows, test.rows), _NUM_RESAMPLES)
    if frontier is None:
        return None
    statistic = _STATISTICS[test.statistic]
    groups = [(Group(a), Group(b)) for a, b in itertools.product(test.firsts, test.seconds)]
    pairs: list[PairEffect] = []
    for first, second in groups:
        found = compare(frontier, first, second, statistic, len(groups), tail)
        if found is not None:
            pairs.append(
                PairEffect(
                    first.name,
                    second.name,
                    found.difference,
                    found.strict,
                    found.first.value.value,
                    found.second.value.value,
                    found.is_untried,
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
    if not any(isinstance(row.decoding.strategy, Autoregressive) for row in found if row.decoding):
        return None
    for key in ("temperature", "task", "pair", "part", "draft"):
        values = {row.setting.get(key) for row in found}
        if len(values) > 1:
            raise UsageError(
                f"a frontier test matches rows with several values of {key}, "
                f"{', '.join(map(str, sorted(values, key=str)))}; name one in rows"
            )
    return Frontier([_result_row(row) for row in found], num_resamples=num_resamples)


def _result_row(row: StudyRow) -> ResultRow:
    """The row of a cell without its text: rows of studies count tokens and do not keep them."""
    assert row.decoding is not None, "the caller checks it"
    counts = row.sums

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

    examples = tuple(example(place) for place in range(len(row.units)))
    return ResultRow(
        key=row.decoding.model_dump_json(),
        context=row.study,
        decoding=row.decoding,
        metric="score",
        status="done",
        examples=examples,
    )
