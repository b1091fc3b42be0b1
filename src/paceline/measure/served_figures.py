"""Compares an engine's counters with the prediction from the probabilities of both models."""

# B requests, T positions, G drafted tokens of a block
from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, NamedTuple

import torch
from pydantic import Field, model_validator
from torch import Tensor

from paceline.config import Options, StrictModel
from paceline.core.bootstrap import ratio_interval
from paceline.core.speed import accepted_by_position, drafted_per_block
from paceline.data.input_checks import InputChecks
from paceline.engines.commands import DraftSampling, EngineChoice, proposals_of
from paceline.engines.contract import Conventions, check_counts
from paceline.measure.acceptance import TextScores, score_texts
from paceline.measure.agreement import Agreement, Counts, GreedyCounts, judge_agreement
from paceline.measure.engine_costs import check_replaceable
from paceline.measure.pair import Pair, PairConfig
from paceline.measure.prompt_checks import check_prompts
from paceline.measure.results import IntervalRow
from paceline.measure.served_costs import WriteCosts
from paceline.progress import Progress, silent
from paceline.rng import named_generator

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.core.sampling import SamplingParams
    from paceline.engines.contract import Request, Served


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
        starts: Number of times that each server is started, with and without the draft in turn. The
            requests and rounds are divided among the starts. With 1, intervals of seconds leave out
            the variation between starts. Does not apply to transformers and running servers.
        write_costs: Also time the engine's steps, for `measure --costs` and `tune --costs`.
    """

    engine: Annotated[EngineChoice, Options("engine", "url")]
    num_prompts: int = Field(default=64, ge=1)
    max_new_tokens: int = Field(default=64, ge=3)
    num_speculative_tokens: int = Field(default=3, ge=1)
    drafting: DraftSampling = "greedy"
    plain: bool = True
    starts: int = Field(default=2, ge=1)
    write_costs: Annotated[WriteCosts | None, Options(write_costs="file")] = None

    def check(self) -> InputChecks:
        """Check the inputs; raises UsageError."""
        checks = InputChecks()
        checks.engine(self.engine)
        checks.device(self.device)
        models = checks.pair(self.target, self.draft)
        check_prompts(checks, self, models, new_tokens=self.max_new_tokens)
        if self.write_costs is not None:
            checks.file(self.write_costs.file)
            check_replaceable(self.write_costs.file)
        return checks

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


class Comparison(NamedTuple):
    """Figures from an engine's counters, predicted figures, and whether they agree."""

    served: BlockFigures
    predicted: BlockFigures
    agreement: Agreement


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
    greedy = None
    if config.sampling.greedy and config.proposals.greedy:
        greedy = _greedy_counts(pair, scores, config, conventions)
    return Comparison(
        served=_figures(theirs, config.seed),
        predicted=_figures(ours, config.seed),
        agreement=judge_agreement(
            *(theirs, ours), engine=config.engine.engine, seed=config.seed, greedy=greedy
        ),
    )


def _greedy_counts(
    pair: Pair, scores: TextScores, config: ServedConfig, conventions: Conventions
) -> GreedyCounts:
    """Counts at temperature 0: known, but for tokens after the end of a text.

    A draft beyond the end is accepted or not, with a range of one block's tokens. Of a text that
    ended by itself, it is unknown whether the engine returns the end, and counts its block.
    """
    settings = scores, config.num_speculative_tokens, config.max_new_tokens, conventions
    least, most = (predicted_counts(*settings, behind_end=part) for part in (0.0, 1.0))
    ended_B = (scores.mask_BT.sum(-1) < config.max_new_tokens).int()
    least, most = (
        side._replace(
            blocks_B=side.blocks_B + sign * ended_B, accepted_B=side.accepted_B + sign * ended_B
        )
        for side, sign in ((least, -1), (most, 1))
    )
    return GreedyCounts(least, most, pair.target.dtype == torch.float32)


def predicted_counts(
    scores: TextScores,
    gamma: int,
    max_new_tokens: int,
    conventions: Conventions,
    behind_end: float | None = None,
) -> Counts:
    """Expected counts of an engine with these conventions over these texts.

    Positions after the end of a text, where the draft is unknown, count with `behind_end`; None:
    with the text's mean.
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
            _extended(part, mask_BT, gamma, value)
            for part, value in (
                (acceptance_BT, behind_end),
                (survival_BT, behind_end),
                (mask_BT, None),
            )
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


def _extended(part_BT: Tensor, mask_BT: Tensor, gamma: int, value: float | None) -> Tensor:
    """Append `gamma` positions with this value, or the row's mean. [B, T] -> [B, T + gamma]."""
    length_B1 = mask_BT.sum(-1, keepdim=True)
    mean_B1 = (part_BT.double() * mask_BT).sum(-1, keepdim=True) / length_B1.clamp(min=1)
    wide_BT = torch.nn.functional.pad(part_BT.double() * mask_BT, (0, gamma))
    positions_T = torch.arange(wide_BT.shape[1])
    appended_BT = (positions_T >= length_B1) & (positions_T < length_B1 + gamma)
    return torch.where(appended_BT, mean_B1 if value is None else value, wide_BT)


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
