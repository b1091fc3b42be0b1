"""Compares an engine's counters with the prediction from the probabilities of both models."""

# B requests, T positions, G drafted tokens of a block
from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from pydantic import Field, model_validator
from torch import Tensor

from paceline.config import StrictModel
from paceline.core.bootstrap import LEAST_UNITS, ratio_interval, ratio_of_ratios_interval
from paceline.core.speed import accepted_by_position, drafted_per_block
from paceline.engines.commands import DraftSampling
from paceline.engines.contract import Conventions, check_counts
from paceline.engines.draft_sampling import proposals_of
from paceline.engines.engine_choice import EngineChoice
from paceline.measure.acceptance import TextScores, score_texts
from paceline.measure.pair import Pair, PairConfig
from paceline.measure.results import IntervalRow
from paceline.measure.served_costs import WriteCosts
from paceline.progress import Progress, silent
from paceline.rng import named_generator

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.core.sampling import SamplingParams
    from paceline.engines.contract import Request, Served

_TOLERANCE = 0.02
_REASONS = {
    "vllm": "another data type than the prediction's, or a running server with another "
    "num_speculative_tokens or draft_sample_method",
    "llamacpp": "a quantized target or draft, --spec-draft-p-min above 0, or a running server with "
    "another --spec-draft-n-max",
    "sglang": "another data type, acceptance thresholds below 1, or another number of steps",
    "transformers": "another data type",
}


class ServedConfig(PairConfig):
    """Configuration of `measure --engine`.

    Attributes:
        engine: The engine, by name or with its settings.
        num_prompts: Number of requests.
        num_speculative_tokens: Draft tokens per block (gamma). Must match a server that is already
            running.
        drafting: How vLLM samples draft tokens. llama-server and SGLang draft greedily;
            transformers drafts at the square of the request's temperature.
        plain: Also measure without the draft, unless the server is already running.
        write_costs: Also time the engine's steps, for `measure --costs` and `tune --costs`.
    """

    engine: EngineChoice
    num_prompts: int = Field(default=64, ge=1)
    max_new_tokens: int = Field(default=64, ge=3)
    num_speculative_tokens: int = Field(default=3, ge=1)
    drafting: DraftSampling = "greedy"
    plain: bool = True
    write_costs: WriteCosts | None = None

    @model_validator(mode="after")
    def _fits_the_engine(self) -> ServedConfig:
        engine = self.engine.engine
        if self.drafting == "probabilistic" and engine != "vllm":
            raise ValueError(f"drafting=probabilistic is for vllm, not {engine}; leave it out")
        if self.draft_sampling is not None:
            raise ValueError(
                "draft_sampling does not apply to engines; set drafting=greedy or probabilistic"
            )
        if self.sampling.repetition_penalty != 1:
            raise ValueError(
                "predictions do not support repetition_penalty, because engines apply it to the "
                "target only or to part of the text; leave repetition_penalty out"
            )
        costs = self.write_costs
        if costs is not None and self.engine.url is not None:
            raise ValueError(
                "write_costs starts the engine with and without the draft, so it cannot use a "
                "running server; leave url out"
            )
        if costs is not None and engine == "transformers" and set(costs.batch_sizes) != {1}:
            raise ValueError(
                "transformers assists one text at a time; leave write_costs.batch_sizes at [1]"
            )
        if engine == "transformers" and self.sampling.top_p < 1:
            raise ValueError(
                "predictions do not support top_p with transformers, which applies it twice to the "
                "draft; use top_k or neither"
            )
        return self

    @property
    def proposals(self) -> SamplingParams:
        """Sampling parameters of the engine's drafts."""
        return proposals_of(self.engine.engine, self.drafting, self.sampling)


class BlockFigures(StrictModel):
    """Figures of blocks, with intervals over requests.

    Attributes:
        block_efficiency: 1 + accepted tokens per block.
        draft_acceptance_rate: Accepted / drafted tokens.
        acceptance_by_position: Fraction of blocks that accept the first, second, ... drafted token;
            None if the engine does not report it.
    """

    block_efficiency: IntervalRow
    draft_acceptance_rate: IntervalRow
    acceptance_by_position: list[IntervalRow] | None


class Agreement(StrictModel):
    """Whether the engine's counters agree with the prediction.

    Attributes:
        agrees: True if they agree.
        decided: False if there were too few requests for a verdict; then `agrees` is false.
        reason: The figures that differ, with possible causes.
        ratio: Tokens per target call, served / predicted, paired by request.
    """

    agrees: bool
    decided: bool = True
    reason: str
    ratio: IntervalRow

    def __str__(self) -> str:
        if not self.decided:
            return f"TOO FEW: {self.reason}"
        return f"{'agrees' if self.agrees else 'differs'}: {self.reason}"

    @property
    def exit_code(self) -> int:
        """Of the command line: 0 agrees, 1 differs, 3 no verdict."""
        if not self.decided:
            return 3
        return 0 if self.agrees else 1


class Comparison(NamedTuple):
    """Figures from an engine's counters, predicted figures, and whether they agree."""

    served: BlockFigures
    predicted: BlockFigures
    agreement: Agreement


class Counts(NamedTuple):
    """Blocks, drafted and accepted tokens of each request, [B]; accepted by position, [B, G]."""

    blocks_B: Tensor
    drafted_B: Tensor
    accepted_B: Tensor
    by_position_BG: Tensor | None


def compare_served(
    pair: Pair,
    requests: Sequence[Request],
    served: Sequence[Served],
    conventions: Conventions,
    config: ServedConfig,
    progress: Progress = silent,
) -> Comparison:
    """Score the engine's texts with both models, and compare the prediction with its counters.

    Both describe the same texts, so the random draws of the texts affect both equally.

    Raises:
        EngineError: The counters do not match the texts.
    """
    gamma = config.num_speculative_tokens
    for one in served:
        check_counts(one, gamma, conventions)
    counted = [both for both in zip(requests, served, strict=True) if both[1].blocks is not None]
    prompts, texts = [request.prompt for request, _ in counted], [one.tokens for _, one in counted]
    scores = score_texts(*pair, prompts, texts, config.sampling, progress, config.proposals)
    ours = predicted_counts(scores, gamma, config.max_new_tokens, conventions)
    theirs = _counts([one for _, one in counted], gamma)
    predicted, measured = _figures(ours, config.seed), _figures(theirs, config.seed)
    ratio = IntervalRow.of(
        ratio_of_ratios_interval(
            (theirs.accepted_B + theirs.blocks_B, theirs.blocks_B),
            (ours.accepted_B + ours.blocks_B, ours.blocks_B),
            rng=named_generator(config.seed, "served / predicted"),
        )
    )
    num_blocks = float(ours.blocks_B.sum())
    agreement = judge_agreement(measured, predicted, ratio, len(counted), num_blocks, config)
    return Comparison(measured, predicted, agreement)


def predicted_counts(
    scores: TextScores, gamma: int, max_new_tokens: int, conventions: Conventions
) -> Counts:
    """Expected counts of an engine with these conventions over these texts.

    Positions after the end of a text, where the draft is unknown, count with the text's mean.
    """
    whole = scores.acceptance_BT, scores.survival_BT, scores.mask_BT
    acceptance_BT, survival_BT, mask_BT = (
        whole if conventions.drafts_first_token else scores.drafted
    )
    budget = max_new_tokens - (not conventions.drafts_first_token)
    length_B = mask_BT.sum(-1)
    budget_B, starts_before = torch.full_like(length_B, budget), None
    if conventions.counts_behind_end:
        budget_B, starts_before = length_B + gamma + 1, length_B
        acceptance_BT, survival_BT, extended_BT = (
            _extended(part, mask_BT, gamma) for part in (acceptance_BT, survival_BT, mask_BT)
        )
        mask_BT = extended_BT.bool()
    elif not conventions.counts_empty_blocks:
        starts_before = budget_B - 1
    by_position_BG, blocks_B = accepted_by_position(
        *(acceptance_BT, survival_BT, mask_BT, gamma), budget=budget_B, starts_before=starts_before
    )
    if conventions.counts_behind_end:
        drafted_B = gamma * blocks_B
    else:
        drafted_B = _drafted(acceptance_BT, survival_BT, mask_BT, gamma, budget_B)
    return Counts(blocks_B, drafted_B, by_position_BG.sum(-1), by_position_BG)


def _drafted(
    acceptance_BT: Tensor, survival_BT: Tensor, mask_BT: Tensor, gamma: int, budget_B: Tensor
) -> Tensor:
    """Expected number of drafted tokens of each text, [B]."""
    parts = acceptance_BT, survival_BT, mask_BT
    _, blocks_B = accepted_by_position(*parts, gamma, budget=budget_B)
    per_block = [
        drafted_per_block(survival_BT[row, None], mask_BT[row, None], gamma, budget=budget_B[row])
        for row in range(len(blocks_B))
    ]
    return blocks_B * torch.tensor(per_block)


def _extended(part_BT: Tensor, mask_BT: Tensor, gamma: int) -> Tensor:
    """Append `gamma` positions with the row's mean to each text. [B, T] -> [B, T + gamma]."""
    length_B1 = mask_BT.sum(-1, keepdim=True)
    mean_B1 = (part_BT.double() * mask_BT).sum(-1, keepdim=True) / length_B1.clamp(min=1)
    wide_BT = torch.nn.functional.pad(part_BT.double() * mask_BT, (0, gamma))
    positions_T = torch.arange(wide_BT.shape[1])
    appended_BT = (positions_T >= length_B1) & (positions_T < length_B1 + gamma)
    return torch.where(appended_BT, mean_B1, wide_BT)


def _counts(served: Sequence[Served], gamma: int) -> Counts:
    counts = [one.blocks for one in served if one.blocks is not None]
    known = [
        count.accepted_by_position for count in counts if count.accepted_by_position is not None
    ]
    by_position = None
    if len(known) == len(counts):
        by_position = torch.tensor([[*row, *[0] * gamma][:gamma] for row in known])
    return Counts(
        torch.tensor([count.num_blocks for count in counts]),
        torch.tensor([count.num_drafted for count in counts]),
        torch.tensor([count.num_accepted for count in counts]),
        by_position,
    )


def _figures(counts: Counts, seed: int) -> BlockFigures:
    def share(over_B: Tensor, under_B: Tensor) -> IntervalRow:
        rng = named_generator(seed, "served figures")
        return IntervalRow.of(ratio_interval(over_B, under_B, rng=rng))

    by_position = None
    if counts.by_position_BG is not None:
        by_position = [share(one_B, counts.blocks_B) for one_B in counts.by_position_BG.unbind(-1)]
    return BlockFigures(
        block_efficiency=share(counts.accepted_B + counts.blocks_B, counts.blocks_B),
        draft_acceptance_rate=share(counts.accepted_B, counts.drafted_B),
        acceptance_by_position=by_position,
    )


def judge_agreement(
    served: BlockFigures,
    predicted: BlockFigures,
    ratio: IntervalRow,
    num_requests: int,
    num_blocks: float,
    config: ServedConfig,
) -> Agreement:
    """Decide whether an engine's figures agree with the prediction.

    They agree if the interval of tokens per target call, served / predicted, comes within 0.02 of
    1, and each figure is within 0.02 of the prediction's interval. Above temperature 0, this
    interval is widened by two standard errors of the engine's random draws over `num_blocks`
    blocks. No verdict with fewer than 8 requests.
    """
    if num_requests < LEAST_UNITS:
        reason = (
            f"{num_requests} requests, but a verdict needs {LEAST_UNITS}; set "
            f"num_prompts={LEAST_UNITS} or more and give as many prompts"
        )
        return Agreement(agrees=False, decided=False, reason=reason, ratio=ratio)
    off: list[str] = []
    if ratio.low > 1 + _TOLERANCE or ratio.high < 1 - _TOLERANCE:
        off.append(f"tokens per target call served / predicted {ratio}")
    figures = _paired(served, predicted)
    for name, (ours, theirs, variance) in figures.items():
        margin = 0.0 if config.sampling.greedy else 2 * (variance / num_blocks) ** 0.5
        low, high = theirs.low - margin - _TOLERANCE, theirs.high + margin + _TOLERANCE
        if not low <= ours.value <= high:
            off.append(f"{name} {ours.value:.3f}, predicted {theirs}")
    if off:
        reason = f"{'; '.join(off)}; known reasons: {_REASONS[config.engine.engine]}"
        return Agreement(agrees=False, reason=reason, ratio=ratio)
    reason = (
        f"tokens per target call ({ratio} times the prediction) and acceptance at "
        f"{len(figures) - 1} positions agree with the prediction"
    )
    return Agreement(agrees=True, reason=reason, ratio=ratio)


def _paired(
    served: BlockFigures, predicted: BlockFigures
) -> dict[str, tuple[IntervalRow, IntervalRow, float]]:
    """Each figure, served and predicted, with its variance over blocks."""
    ours, theirs = predicted.acceptance_by_position or [], served.acceptance_by_position or []
    shares = [min(max(row.value, 0.0), 1.0) for row in ours]
    # variance of a count that exceeds i with probability shares[i]
    square = sum((2 * position + 1) * share for position, share in enumerate(shares))
    variance = max(square - sum(shares) ** 2, 0.0)
    found = {
        "tokens per target call": (served.block_efficiency, predicted.block_efficiency, variance)
    }
    for position, rows in enumerate(zip(theirs, ours, strict=False)):
        share = shares[position]
        found[f"acceptance at position {position}"] = (*rows, share * (1 - share))
    return found
