"""Rows with an engine's seconds in place of those of our own decoder."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.decode.strategies import Autoregressive, Speculative

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.bench.schema import ExampleRow, ResultRow
    from paceline.measure.engine_costs import EngineCosts


def price(rows: Sequence[ResultRow], costs: EngineCosts, concurrency: int) -> list[ResultRow]:
    """The rows as the engine would take them, behind the prompt: steps times the cost of a step.

    Args:
        rows: Of the target alone and of rules with blocks of a fixed length.
        costs: Of the engine.
        concurrency: Requests that it serves at the same time.
    """
    return [_priced(row, costs, concurrency) for row in rows]


def _priced(row: ResultRow, costs: EngineCosts, concurrency: int) -> ResultRow:
    strategy = row.decoding.strategy
    if isinstance(strategy, Speculative):
        gamma = strategy.num_speculative_tokens
        passes = costs.pass_costs([gamma], concurrency)
        step_s = passes.drafting_s[gamma] + passes.judging_s[gamma]
    else:
        assert isinstance(strategy, Autoregressive), "tune measures nothing else"
        passes = costs.pass_costs(costs.gammas[:1], concurrency)
        step_s = passes.target_pass_s
    examples = [_example(one, step_s, passes.target_pass_s) for one in row.examples]
    return row.model_copy(update={"examples": tuple(examples)})


def _example(example: ExampleRow, step_s: float, plain_s: float) -> ExampleRow:
    beside = example.baseline
    if beside is not None:
        # the prompt's pass gives the first token
        seconds = plain_s * max(beside.num_tokens - 1, 0)
        beside = beside.model_copy(update={"seconds": seconds, "first_seconds": 0.0})
    return example.model_copy(
        update={
            "seconds": step_s * example.num_target_calls,
            "first_seconds": 0.0,
            "baseline": beside,
        }
    )
