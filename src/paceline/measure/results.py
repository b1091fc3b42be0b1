"""Result rows of a measurement; one schema for JSON, tables and reports."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated

import torch
from pydantic import BeforeValidator, PlainSerializer

from paceline.config import StrictModel
from paceline.core.bootstrap import Interval
from paceline.core.bounded_means import bounded_mean_interval
from paceline.rng import named_generator

if TYPE_CHECKING:
    from collections.abc import Sequence


def _null_is(unknown: float) -> BeforeValidator:
    return BeforeValidator(lambda value: unknown if value is None else value)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


_InJson = PlainSerializer(_finite, float | None, when_used="json")
Value = Annotated[float, _null_is(math.nan), _InJson]
Low = Annotated[float, _null_is(-math.inf), _InJson]
High = Annotated[float, _null_is(math.inf), _InJson]


class IntervalRow(StrictModel):
    """A ratio of sums with its 95% interval over prompts.

    Unknown bounds, such as those of a single request, are infinite: null in JSON.
    """

    value: Value
    low: Low
    high: High

    @classmethod
    def of(cls, interval: Interval) -> IntervalRow:
        return cls(value=interval.value, low=interval.low, high=interval.high)

    @classmethod
    def of_scores(cls, scores: Sequence[float], seed: int) -> IntervalRow | None:
        """Mean of scores in [0, 1]; None without scores."""
        if not scores:
            return None
        rng = named_generator(seed, "mean score")
        scores_N = torch.tensor(scores, dtype=torch.float64)
        return cls.of(bounded_mean_interval(scores_N, rng=rng))

    @property
    def interval(self) -> Interval:
        """As a tuple."""
        return Interval(self.value, self.low, self.high)

    def text(self, form: str = ".3f", between: str = " to ") -> str:
        """As `Interval.text`."""
        return self.interval.text(form, between)

    def __str__(self) -> str:
        return self.text()


class AcceptanceRow(StrictModel):
    """Acceptance of the draft on text sampled from the target."""

    num_prompts: int
    num_tokens: int
    expected_acceptance: IntervalRow
    """sum_t sum_v min(p, q) / number of tokens: the acceptance if drafts are sampled."""
    greedy_draft_acceptance: IntervalRow
    """Mean of p(argmax q): the acceptance with greedy drafting."""
    greedy_agreement: IntervalRow
    """Fraction of positions where argmax q = argmax p."""
    acceptance_by_position: list[float]
    """expected_acceptance of the first, second, ... new token, over texts that contain it."""


class CostRow(StrictModel):
    """Cost of forward passes: median seconds of interleaved passes at batch size 1, one token each.

    With the costs of an engine, `draft_pass_s` is the time that a drafted token adds to a step.
    Unknown times, of models that cannot roll back, are NaN: null in JSON.
    """

    target_pass_s: Value = math.nan
    draft_pass_s: Value = math.nan
    cost_ratio: Value = math.nan
    """c: draft pass / target pass."""
    target_parameters: int
    draft_parameters: int
    engine: str = ""
    """The engine with these costs; empty: Paceline's decoder."""
    target_start_s: float | None = None
    """Of an encoder-decoder: seconds from a source to the first logits, encoder included."""
    draft_start_s: float | None = None
    """The same of the draft; a request waits for both before its first block."""


class GammaRow(StrictModel):
    """Predictions for blocks of `gamma` drafted tokens."""

    gamma: int
    block_efficiency_iid: float
    """(1 - alpha^(gamma+1)) / (1 - alpha)."""
    block_efficiency: float
    """From per-position acceptance along the text; the last block of a text may be shorter."""
    drafted_per_block: float
    """Mean number of drafted tokens per block; below `gamma` if budgets end within blocks."""
    break_even_acceptance: float | None = None
    """Acceptance above which a block is faster than plain decoding; None if there is none."""
    predicted_speedup: Value = math.nan
    """block_efficiency / (c gamma + 1); NaN without costs, as the figures below that need them."""
    mbsu: float
    """predicted_speedup with the parameter ratio as c."""
    drafting_cost_ratio: Value = math.nan
    """c within a block: seconds per drafted token / target pass. Of an engine, which reports only
    the time of whole blocks: the c for which tau / (c gamma + 1) is its speedup."""
    block_cost_ratio: Value = math.nan
    """Target pass over gamma + 1 tokens / over one; 1 in predicted_speedup and of an engine."""
    expected_speedup: Value = math.nan
    """block_efficiency / (drafting_cost_ratio gamma + block_cost_ratio), both costs scaled to
    `drafted_per_block` tokens."""
    block_s: float | None = None
    """Seconds per block; None without costs."""


class TriedRow(StrictModel):
    """A gamma timed to choose one, on requests that `SpeedRow` does not use."""

    gamma: int
    num_requests: int
    tokens_per_s: float
    """After the first token: block efficiency of the scored texts / median seconds per block."""
    expected_speedup: float


class SpeedRow(StrictModel):
    """Paired timing of requests at one gamma, with and without the draft, interleaved."""

    gamma: int
    num_requests: int
    num_tokens: int
    speedup: IntervalRow
    """Seconds per token, baseline / speculative, of whole requests including the prefill."""
    decoding_speedup: IntervalRow
    """From the first token on, as in the prediction."""
    cost_ratio: float
    """c, from passes timed between the requests."""
    predicted_speedup: float
    """block_efficiency / (c gamma + 1), with this c, and block_efficiency of the scored texts."""
    measured_over_predicted: float
    """decoding_speedup / predicted_speedup."""
    engine_efficiency: float
    """decoding_speedup / predicted_speedup with the block efficiency of these requests; the rest is
    spent on longer target passes and on work outside the passes."""
    baseline_tokens_per_s: float
    speculative_tokens_per_s: float
    block_efficiency: float
    acceptance_rate: float
