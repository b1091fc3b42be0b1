"""Rows with an engine's seconds in place of those of Paceline's decoder."""

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
    """The rows as the engine would decode them, after the prompt: steps times the cost of a step.

    Args:
        rows: Of the target alone and of rules with blocks of a fixed length.
        costs: Of the engine.
        concurrency: Requests that it serves at the same time.
    """
    found: list[ResultRow] = []
    for row in rows:
        strategy = row.decoding.strategy
        gamma = strategy.num_speculative_tokens if isinstance(strategy, Speculative) else 0
        examples = [_example(one, gamma, costs, concurrency) for one in row.examples]
        found.append(row.model_copy(update={"examples": tuple(examples)}))
    return found


def _example(example: ExampleRow, gamma: int, costs: EngineCosts, concurrency: int) -> ExampleRow:
    calls, beside = example.num_target_calls, example.baseline
    drafted = example.num_drafted / calls if calls else None
    if beside is not None:
        # the prompt's pass gives the first token
        seconds = costs.block_s(0, concurrency) * max(beside.num_tokens - 1, 0)
        beside = beside.model_copy(update={"seconds": seconds, "first_seconds": 0.0})
    return example.model_copy(
        update={
            "seconds": costs.block_s(gamma, concurrency, drafted) * calls,
            "first_seconds": 0.0,
            "baseline": beside,
        }
    )
