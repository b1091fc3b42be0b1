"""Replaces the seconds of result rows, measured with Paceline's decoder, by those of an engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.decode.strategies import Speculative

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.bench.schema import ExampleRow, ResultRow
    from paceline.measure.engine_costs import EngineCosts


def in_engine_seconds(
    rows: Sequence[ResultRow], costs: EngineCosts, concurrency: int
) -> list[ResultRow]:
    """Set the seconds of each row to number of steps x seconds per step, without the prefill.

    Rows must be of the target alone, or of a rule with blocks of a fixed length.
    """
    found: list[ResultRow] = []
    for row in rows:
        strategy = row.decoding.strategy
        gamma = strategy.num_speculative_tokens if isinstance(strategy, Speculative) else 0
        examples = [_example(one, gamma, costs, concurrency) for one in row.examples]
        found.append(row.model_copy(update={"examples": tuple(examples)}))
    return found


def _example(example: ExampleRow, gamma: int, costs: EngineCosts, concurrency: int) -> ExampleRow:
    calls, baseline = example.num_target_calls, example.baseline
    drafted = example.num_drafted / calls if calls else None
    if baseline is not None:
        # the prefill gives the first token
        seconds = costs.block_s(0, concurrency) * max(baseline.num_tokens - 1, 0)
        baseline = baseline.model_copy(update={"seconds": seconds, "first_seconds": 0.0})
    seconds = costs.block_s(gamma, concurrency, drafted) * calls
    changes = {"seconds": seconds, "first_seconds": 0.0, "baseline": baseline}
    return example.model_copy(update=changes)
