"""The rows that a measurement is made of; one schema for JSON, tables and reports."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import ConfigDict

from paceline.config import StrictModel

if TYPE_CHECKING:
    from paceline.core.bootstrap import Interval


class IntervalRow(StrictModel):
    """A ratio of sums with its 95% interval over prompts.

    A bound that nothing is known of, as of one request, is infinite: "Infinity" in JSON.
    """

    model_config = ConfigDict(ser_json_inf_nan="strings")

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, interval: Interval) -> IntervalRow:
        return cls(value=interval.value, low=interval.low, high=interval.high)

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"


class AcceptanceRow(StrictModel):
    """How well the draft agrees with the target, on text that the target sampled."""

    num_prompts: int
    num_tokens: int
    expected_acceptance: IntervalRow
    """sum_t sum_v min(p, q) / number of tokens: what an engine that samples its drafts gets."""
    greedy_draft_acceptance: IntervalRow
    """p(argmax q): what an engine that drafts greedily gets."""
    greedy_agreement: IntervalRow
    """argmax q is argmax p."""
    acceptance_by_position: list[float]
    """expected_acceptance of the first, second, ... new token, over the texts that reach it."""


class CostRow(StrictModel):
    """What a pass costs; seconds are medians of interleaved passes at batch 1, a token drawn each.

    Of an engine whose costs were given, `draft_pass_s` is what a drafted token adds to a step.
    """

    target_pass_s: float
    draft_pass_s: float
    cost_ratio: float
    """c: draft pass / target pass."""
    target_parameters: int
    draft_parameters: int
    engine: str = ""
    """Whose passes these are; empty: Paceline's own."""


class GammaRow(StrictModel):
    """What a block of `gamma` drafted tokens promises."""

    gamma: int
    block_efficiency_iid: float
    """(1 - alpha^(gamma+1)) / (1 - alpha)."""
    block_efficiency: float
    """From products of per-position acceptance along the text; a text's last block is shorter."""
    drafted_per_block: float
    """Mean tokens drafted per block: `gamma`, but for blocks near the end of the budget."""
    break_even_acceptance: float | None
    """None: no acceptance suffices."""
    predicted_speedup: float
    """block_efficiency / (c gamma + 1)."""
    mbsu: float
    """The same with c = parameter ratio."""
    drafting_cost_ratio: float
    """c within a block: a drafted token's seconds / target pass. Of an engine, which tells only what a whole
    block takes: the c with which tau / (c gamma + 1) is its speedup."""
    block_cost_ratio: float
    """Target pass over gamma + 1 tokens / over one; the prediction above takes it for 1. Of an engine: 1."""
    expected_speedup: float
    """block_efficiency / (drafting_cost_ratio gamma + block_cost_ratio): what this machine can reach.

    Both costs are taken for `drafted_per_block` tokens."""
    block_s: float | None = None
    """Seconds of a block. None in files of earlier versions."""


class TriedRow(StrictModel):
    """A gamma that was timed to choose one, on requests that `SpeedRow` does not use."""

    gamma: int
    num_requests: int
    tokens_per_s: float
    """Behind the first token: block efficiency of the scored texts / median seconds per block."""
    expected_speedup: float


class SpeedRow(StrictModel):
    """Requests at one gamma, interleaved: seconds a token, baseline / speculative.

    Where several gammas were tried, these requests are not the ones that chose among them.
    """

    gamma: int
    num_requests: int
    num_tokens: int
    speedup: IntervalRow
    """Of whole requests, the passes over their prompts included: what a user waits for."""
    decoding_speedup: IntervalRow
    """From the first token on, which is all that the prediction speaks of."""
    cost_ratio: float
    """c, from passes timed between the requests."""
    predicted_speedup: float
    """block_efficiency / (c gamma + 1), with the block efficiency of the scored texts, this c."""
    measured_over_predicted: float
    """decoding_speedup / predicted_speedup."""
    engine_efficiency: float
    """decoding_speedup / what it would be with the block efficiency found here: what the engine
    keeps of it; the rest goes into longer target passes and work beside the passes."""
    baseline_tokens_per_s: float
    speculative_tokens_per_s: float
    block_efficiency: float
    acceptance_rate: float
