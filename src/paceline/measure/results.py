"""The figures of a measurement by name, from its rows: what its JSON and its page have beside them.

A figure of the registry is that of the row; other names are totals of the row. Both are None where
they are not measured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.core.bootstrap import Interval
from paceline.results.figures import FIGURES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline.results.row import Row

ACCEPTANCE = ("expected_acceptance", "greedy_draft_acceptance", "greedy_agreement")
_PASSES = ("target_pass_s", "draft_pass_s", "cost_ratio")
_STARTS = ("target_start_s", "draft_start_s")
_BLOCKS = (
    *("block_efficiency_iid", "block_efficiency", "drafted_per_block", "break_even_acceptance"),
    *("predicted_speedup", "mbsu", "drafting_cost_ratio", "block_cost_ratio", "expected_speedup"),
    "block_s",
)
_LEAST_BLOCK_COST = 0.9
_MOST_REVERSAL = 1.5


def disturbance(costs: Mapping[int, float]) -> str:
    """Why no idle machine has these block costs, in target passes by gamma; empty: one may.

    A block holds a target pass over more than one token, and more drafted tokens cost more. The
    costs of an idle machine deviate by some percent, where a processor has another code path for
    more tokens. Less than 0.9 target passes, or more than 1.5 times the cost of a block with more
    drafted tokens, is due to other programs.
    """
    fault = ""
    gammas = sorted(costs)
    for at, gamma in enumerate(gammas):
        cost, longer = costs[gamma], gammas[at + 1 :]
        if cost < _LEAST_BLOCK_COST:
            fault = f"a block of gamma {gamma} takes {cost:.2f} of the time of a target pass"
            break
        cheapest = min(longer, key=costs.__getitem__, default=gamma)
        if cost > _MOST_REVERSAL * costs[cheapest]:
            times = f"{cost / costs[cheapest]:.1f} times as long as one of gamma {cheapest}"
            fault = f"a block of gamma {gamma} takes {times}"
            break
    return fault and f"timings were disturbed ({fault}): stop other programs and run again"


def disturbance_of_rows(rows: Sequence[Row]) -> str:
    """`disturbance` of blocks that were timed in Paceline's decoder; empty for others."""
    name = "needed_block_efficiency"
    timed = [row for row in rows if name in row.totals and not row.setting.get("engine")]
    return disturbance({gamma_of(row): row.totals[name] for row in timed})


def gamma_of(row: Row) -> int:
    """Number of drafted tokens per block."""
    return int(row.setting["gamma"])


def value_of(row: Row, name: str) -> float | None:
    """A figure or a total of a row; None if it has neither."""
    figure = FIGURES.get(name)
    return figure.value(row) if figure and figure.is_in(row) else row.totals.get(name)


def of_texts(row: Row, seed: int) -> dict[str, Any]:
    """Acceptance on the scored texts, with intervals over texts."""
    counts = {"num_prompts": len(row.units), "num_tokens": num_tokens(row)}
    return counts | {name: FIGURES[name].measure(row, seed=seed) for name in ACCEPTANCE}


def of_passes(row: Row) -> dict[str, Any]:
    """Median seconds of interleaved passes over one token, and the sizes of the models.

    Of an engine, `draft_pass_s` is the time that a drafted token adds to a step. The starts are
    those of an encoder-decoder.
    """
    sizes = {f"{name}_parameters": row.source.sizes.get(name) for name in ("target", "draft")}
    named = sizes | {"engine": row.setting.get("engine", "")}
    return _values(row, _PASSES) | named | _values(row, _STARTS)


def of_blocks(row: Row) -> dict[str, Any]:
    """Predictions for blocks of gamma drafted tokens."""
    return {"gamma": gamma_of(row)} | _values(row, _BLOCKS)


def of_trial(row: Row) -> dict[str, Any]:
    """A gamma that was timed to choose one; the figures are those of the scored texts."""
    return {
        "gamma": gamma_of(row),
        "num_requests": int(row.totals["num_requests"]),
        "tokens_per_s": value_of(row, "decoding_tokens_per_s"),
        "expected_speedup": value_of(row, "expected_speedup"),
    }


def of_requests(row: Row, seed: int) -> dict[str, Any]:
    """Requests that were timed by turns with and without the draft, with intervals over them.

    `predicted_speedup` is that of the scored texts, with the costs of passes between the requests.
    """
    scored = row.totals["scored_block_efficiency"]
    return {
        "gamma": gamma_of(row),
        "num_requests": len(row.units),
        "num_tokens": num_tokens(row),
        "speedup": FIGURES["speedup"].measure(row, seed=seed),
        "decoding_speedup": FIGURES["decoding_speedup"].measure(row, seed=seed),
        "cost_ratio": value_of(row, "cost_ratio"),
        "predicted_speedup": FIGURES["predicted_speedup"].of_base(row, scored),
        **_values(row, ("measured_over_predicted", "engine_efficiency")),
        "baseline_tokens_per_s": value_of(row, "target_tokens_per_s"),
        "speculative_tokens_per_s": value_of(row, "tokens_per_s"),
        **_values(row, ("block_efficiency", "acceptance_rate")),
    }


def num_tokens(row: Row) -> int:
    """Tokens of all units."""
    return int(sum(filter(None, row.sums["tokens"])))


def _values(row: Row, names: tuple[str, ...]) -> dict[str, float | None]:
    return {name: value_of(row, name) for name in names}


def as_json(figures: Mapping[str, Any]) -> dict[str, Any]:
    """The figures as JSON values."""
    return {
        name: value.as_object() if isinstance(value, Interval) else value
        for name, value in figures.items()
    }
