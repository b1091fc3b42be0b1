"""An engine's counters beside what both models' probabilities predict, and whether they agree."""

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


class ServedConfig(PairConfig):
    """What to serve, where.

    Attributes:
        engine: The engine, by name or with its settings.
        num_prompts: Requests.
        num_speculative_tokens: Tokens drafted per block. A running server drafts as many as it was
            started with: give the same number here.
        drafting: How vLLM draws its drafts; llama-server and SGLang draft greedily, transformers
            draws them at the square of the request's temperature.
        plain: Also serve without the draft, where the engine is started here.
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
            raise ValueError(f"drafting=probabilistic is a setting of vllm; {engine} has none")
        if self.draft_sampling is not None:
            raise ValueError(
                "draft_sampling is the engine's own here; set drafting=greedy or probabilistic"
            )
        if self.sampling.repetition_penalty != 1:
            raise ValueError(
                "engines apply a repetition penalty to the target alone, or to part of the text, so "
                "nothing is predicted with one; leave repetition_penalty out"
            )
        if self.write_costs is not None and self.engine.url is not None:
            raise ValueError(
                "write_costs needs the engine with and without the draft, so it is started here; leave "
                "url out"
            )
        costs = self.write_costs
        if costs is not None and engine == "transformers" and set(costs.batch_sizes) != {1}:
            raise ValueError(
                "transformers assists one text at a time; leave write_costs.batch_sizes at [1]"
            )
        if engine == "transformers" and self.sampling.top_p < 1:
            raise ValueError(
                "transformers applies top_p to the draft twice, which is not predicted; use top_k or "
                "neither"
            )
        return self

    @property
    def proposals(self) -> SamplingParams:
        """How the engine draws drafts."""
        return proposals_of(self.engine.engine, self.drafting, self.sampling)


class BlockFigures(StrictModel):
    """How blocks went, with intervals over requests.

    Attributes:
        block_efficiency: 1 + accepted tokens per block.
        draft_acceptance_rate: Accepted / drafted.
        acceptance_by_position: Fraction of blocks that accept the first, second, ... drafted token;
            None: the engine does not report it.
    """

    block_efficiency: IntervalRow
    draft_acceptance_rate: IntervalRow
    acceptance_by_position: list[IntervalRow] | None


class Agreement(StrictModel):
    """Whether the engine gives what was predicted.

    Attributes:
        agrees: It does.
        decided: False where too few requests were served for a verdict; `agrees` is false then.
        reason: Figures that differ, and why that may be.
        ratio: Accepted tokens per block, served / predicted, paired by request.
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
    """What an engine's own counters say, what was predicted, and whether both agree."""

    served: BlockFigures
    predicted: BlockFigures
    agreement: Agreement


class Counts(NamedTuple):
    """Of each request: blocks, drafted and accepted tokens [B]; accepted by position [B, G] or None."""

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
    """Score the engine's texts by both models, and compare its counters with that.

    Both describe the same texts, so the luck of what was written is in neither.

    Raises:
        EngineError: The counters do not belong to these texts.
    """
    gamma = config.num_speculative_tokens
    for one in served:
        check_counts(one, gamma, conventions)
    told = [both for both in zip(requests, served, strict=True) if both[1].blocks is not None]
    prompts, texts = [request.prompt for request, _ in told], [one.tokens for _, one in told]
    scores = score_texts(*pair, prompts, texts, config.sampling, progress, config.proposals)
    ours = predicted_counts(scores, gamma, config.max_new_tokens, conventions)
    theirs = _counted([one for _, one in told], gamma)
    predicted, counted = _figures(ours, config.seed), _figures(theirs, config.seed)
    ratio = IntervalRow.of(
        ratio_of_ratios_interval(
            (theirs.accepted_B + theirs.blocks_B, theirs.blocks_B),
            (ours.accepted_B + ours.blocks_B, ours.blocks_B),
            rng=named_generator(config.seed, "served / predicted"),
        )
    )
    num_blocks = float(ours.blocks_B.sum())
    agreement = judge_agreement(counted, predicted, ratio, len(told), num_blocks, config)
    return Comparison(counted, predicted, agreement)


def predicted_counts(
    scores: TextScores, gamma: int, max_new_tokens: int, conventions: Conventions
) -> Counts:
    """What an engine with these conventions is expected to count over these texts.

    What it drafts behind a text's end is not known; each such position counts as the text's mean.
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
    """Expected drafted tokens of each text within its budget, [B]."""
    parts = acceptance_BT, survival_BT, mask_BT
    _, blocks_B = accepted_by_position(*parts, gamma, budget=budget_B)
    per_block = [
        drafted_per_block(survival_BT[row, None], mask_BT[row, None], gamma, budget=budget_B[row])
        for row in range(len(blocks_B))
    ]
    return blocks_B * torch.tensor(per_block)


def _extended(part_BT: Tensor, mask_BT: Tensor, gamma: int) -> Tensor:
    """The row's mean at the next `gamma` positions behind its text. [B, T] -> [B, T + gamma]."""
    length_B1 = mask_BT.sum(-1, keepdim=True)
    mean_B1 = (part_BT.double() * mask_BT).sum(-1, keepdim=True) / length_B1.clamp(min=1)
    wide_BT = torch.nn.functional.pad(part_BT.double() * mask_BT, (0, gamma))
    places_T = torch.arange(wide_BT.shape[1])
    behind_BT = (places_T >= length_B1) & (places_T < length_B1 + gamma)
    return torch.where(behind_BT, mean_B1, wide_BT)


def _counted(served: Sequence[Served], gamma: int) -> Counts:
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

    positions = counts.by_position_BG
    return BlockFigures(
        block_efficiency=share(counts.accepted_B + counts.blocks_B, counts.blocks_B),
        draft_acceptance_rate=share(counts.accepted_B, counts.drafted_B),
        acceptance_by_position=(
            None
            if positions is None
            else [share(position_B, counts.blocks_B) for position_B in positions.unbind(-1)]
        ),
    )


def judge_agreement(
    served: BlockFigures,
    predicted: BlockFigures,
    ratio: IntervalRow,
    num_requests: int,
    num_blocks: float,
    config: ServedConfig,
) -> Agreement:
    """The engine agrees if it makes as many tokens per block, and each figure is near its prediction.

    As many: the interval of served / predicted, paired by request, comes within 0.02 of 1. Near: within
    0.02 of the prediction's interval, which above temperature 0 is widened by two standard errors of
    the engine's own draws in so many blocks. No verdict rests on fewer than 8 requests.
    """
    if num_requests < LEAST_UNITS:
        reason = (
            f"{num_requests} requests, and a verdict takes {LEAST_UNITS}; set num_prompts and give as "
            "many prompts"
        )
        return Agreement(agrees=False, decided=False, reason=reason, ratio=ratio)
    off: list[str] = []
    if ratio.low > 1 + _TOLERANCE or ratio.high < 1 - _TOLERANCE:
        off.append(f"tokens per target call served / predicted {ratio}")
    figures = _beside(served, predicted)
    for name, (ours, theirs, variance) in figures.items():
        chance = 0.0 if config.sampling.greedy else 2 * (variance / num_blocks) ** 0.5
        low, high = theirs.low - chance - _TOLERANCE, theirs.high + chance + _TOLERANCE
        if not low <= ours.value <= high:
            off.append(f"{name} {ours.value:.3f}, predicted {theirs}")
    if off:
        return Agreement(agrees=False, reason=f"{'; '.join(off)}; {_reasons(config)}", ratio=ratio)
    reason = (
        f"tokens per target call ({ratio} times the prediction) and acceptance at {len(figures) - 1} "
        "positions are as predicted"
    )
    return Agreement(agrees=True, reason=reason, ratio=ratio)


def _beside(
    served: BlockFigures, predicted: BlockFigures
) -> dict[str, tuple[IntervalRow, IntervalRow, float]]:
    """Each figure, served and predicted, with its variance over blocks."""
    ours, theirs = predicted.acceptance_by_position or [], served.acceptance_by_position or []
    shares = [min(max(row.value, 0.0), 1.0) for row in ours]
    # of a count that is i or more with probability shares[i - 1]
    square = sum((2 * place + 1) * share for place, share in enumerate(shares))
    variance = max(square - sum(shares) ** 2, 0.0)
    found = {
        "tokens per target call": (served.block_efficiency, predicted.block_efficiency, variance)
    }
    for place, rows in enumerate(zip(theirs, ours, strict=False)):
        share = shares[place]
        found[f"acceptance at position {place}"] = (*rows, share * (1 - share))
    return found


def _reasons(config: ServedConfig) -> str:
    reasons = {
        "vllm": "known reasons: another numeric type than the prediction's, or a running server with "
        "other num_speculative_tokens or another draft_sample_method",
        "llamacpp": "known reasons: a quantised target or draft, --spec-draft-p-min above 0, or a running "
        "server with another --spec-draft-n-max",
        "sglang": "known reasons: another numeric type, acceptance thresholds below 1, or another number "
        "of steps",
        "transformers": "known reasons: another numeric type",
    }
    return reasons[config.engine.engine]
