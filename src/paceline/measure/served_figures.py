"""An engine's counters beside what both models' probabilities predict, and whether they agree."""

# B requests, G drafted tokens of a block
from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from pydantic import Field, model_validator
from torch import Tensor

from paceline.config import StrictModel
from paceline.core.bootstrap import ratio_interval
from paceline.core.sampling import SamplingParams
from paceline.core.speed import accepted_by_position, drafted_per_block, tokens_and_blocks
from paceline.engines.choice import EngineChoice
from paceline.engines.commands import DraftSampling
from paceline.measure.acceptance import score_texts
from paceline.measure.pair import Pair, PairConfig
from paceline.measure.results import IntervalRow
from paceline.progress import Progress, silent
from paceline.rng import named_generator

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.engines.contract import Request, Served

_GREEDY = SamplingParams(temperature=0.0)
# These draft whole blocks up to a text's end, and count what lies behind it.
_BEHIND_THE_END = ("vllm", "sglang")
# This one drafts before the target has read the prompt, so a text's first token is drafted, too.
_FROM_THE_FIRST = ("transformers",)


class ServedConfig(PairConfig):
    """What to serve, where.

    Attributes:
        engine: The engine, by name or with its settings.
        num_prompts: Requests.
        num_speculative_tokens: Tokens drafted per block. A running server drafts as many as it was
            started with: say the same number here.
        drafting: How vLLM draws its drafts; llama-server and SGLang draft greedily, transformers as
            the request says.
        plain: Also serve without the draft, where the engine is started here.
    """

    engine: EngineChoice
    num_prompts: int = Field(default=64, ge=1)
    max_new_tokens: int = Field(default=64, ge=3)
    num_speculative_tokens: int = Field(default=3, ge=1)
    drafting: DraftSampling = "greedy"
    plain: bool = True

    @model_validator(mode="after")
    def _fits_the_engine(self) -> ServedConfig:
        if self.drafting == "probabilistic" and self.engine.engine != "vllm":
            raise ValueError(
                f"drafting=probabilistic is a setting of vllm; {self.engine.engine} has none"
            )
        if self.draft_sampling is not None:
            raise ValueError(
                "draft_sampling is the engine's own here; set drafting=greedy or probabilistic"
            )
        return self

    @property
    def proposals(self) -> SamplingParams:
        """How the engine draws drafts."""
        if self.engine.engine == "transformers":
            return self.sampling
        if self.drafting == "probabilistic":
            return SamplingParams(temperature=self.sampling.temperature)
        return _GREEDY


class BlockFigures(StrictModel):
    """How blocks went, with intervals over requests.

    Attributes:
        block_efficiency: Tokens per target call, the first token of a text left out.
        draft_acceptance_rate: Accepted / drafted.
        acceptance_by_position: Blocks whose first, second, ... token was kept / blocks; None: the
            engine does not say.
    """

    block_efficiency: IntervalRow
    draft_acceptance_rate: IntervalRow
    acceptance_by_position: list[IntervalRow] | None


class Agreement(StrictModel):
    """Whether the engine gives what was predicted."""

    agrees: bool
    reason: str

    def __str__(self) -> str:
        return f"{'agrees' if self.agrees else 'differs'}: {self.reason}"


class Comparison(NamedTuple):
    """What an engine's own counters say, what was predicted, and whether both agree."""

    served: BlockFigures
    predicted: BlockFigures
    agreement: Agreement


def compare_served(
    pair: Pair,
    requests: Sequence[Request],
    served: Sequence[Served],
    config: ServedConfig,
    progress: Progress = silent,
) -> Comparison:
    """Score the engine's texts by both models, and hold its counters against that.

    Over the engine's own texts, so that no other text's luck is between the two.
    """
    told = [
        pair_of for pair_of in zip(requests, served, strict=True) if pair_of[1].blocks is not None
    ]
    ours = _predicted(pair, told, config, progress)
    counted = _figures(_counted(served, config.num_speculative_tokens), config.seed)
    predicted = _figures(ours, config.seed)
    num_blocks = float(ours.blocks_B.sum())
    return Comparison(counted, predicted, judge_agreement(counted, predicted, num_blocks, config))


class _Blocks(NamedTuple):
    """Counts of each request, [B]; by position [B, G] or None."""

    blocks_B: Tensor
    drafted_B: Tensor
    accepted_B: Tensor
    by_position_BG: Tensor | None


def _counted(served: Sequence[Served], gamma: int) -> _Blocks:
    counts = [one.blocks for one in served if one.blocks is not None]
    known = [
        count.accepted_by_position for count in counts if count.accepted_by_position is not None
    ]
    by_position = None
    if len(known) == len(counts):
        by_position = torch.tensor([[*row, *[0] * gamma][:gamma] for row in known])
    return _Blocks(
        torch.tensor([count.num_blocks for count in counts]),
        torch.tensor([count.num_drafted for count in counts]),
        torch.tensor([count.num_accepted for count in counts]),
        by_position,
    )


def _predicted(
    pair: Pair,
    told: Sequence[tuple[Request, Served]],
    config: ServedConfig,
    progress: Progress,
) -> _Blocks:
    prompts = [request.prompt for request, _ in told]
    texts = [one.tokens for _, one in told]
    scores = score_texts(*pair, prompts, texts, config.sampling, progress, config.proposals)
    gamma, engine = config.num_speculative_tokens, config.engine.engine
    whole = scores.acceptance_BT, scores.survival_BT, scores.mask_BT
    drafted = whole if engine in _FROM_THE_FIRST else scores.drafted
    _, survival_BT, mask_BT = drafted
    budget_B = mask_BT.sum(-1)
    if engine in _BEHIND_THE_END:
        budget_B = budget_B + gamma + 1
    by_position_BG = accepted_by_position(*drafted, gamma, budget=budget_B)
    blocks_B = tokens_and_blocks(*drafted, gamma, budget=budget_B)[1]
    per_block_B = torch.tensor(
        [
            drafted_per_block(
                survival_BT[row, None], mask_BT[row, None], gamma, budget=budget_B[row]
            )
            for row in range(len(texts))
        ]
    )
    return _Blocks(blocks_B, per_block_B * blocks_B, by_position_BG.sum(-1), by_position_BG)


def _figures(counts: _Blocks, seed: int) -> BlockFigures:
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
    served: BlockFigures, predicted: BlockFigures, num_blocks: float, config: ServedConfig
) -> Agreement:
    """The engine agrees where each of its figures lies in the interval of the prediction.

    Above temperature 0 that interval is widened by the chance of the engine's own draws: two standard
    errors of so many blocks that each keep a token or not.
    """
    chance = 0.0 if config.sampling.greedy else 2.0
    gamma = config.num_speculative_tokens
    figures = [("tokens per target call", served.block_efficiency, predicted.block_efficiency, 1.0)]
    if served.acceptance_by_position and predicted.acceptance_by_position:
        both = zip(served.acceptance_by_position, predicted.acceptance_by_position, strict=True)
        figures += [
            (f"acceptance at position {place}", *rows, 0.0) for place, rows in enumerate(both)
        ]
    off: list[str] = []
    for name, ours, theirs, least in figures:
        most = gamma if least else 1.0
        share = min(max((theirs.value - least) / most, 0.0), 1.0)
        error = most * (share * (1 - share) / num_blocks) ** 0.5
        low, high = theirs.low - chance * error, theirs.high + chance * error
        if not low <= ours.value <= high:
            off.append(
                f"{name} {ours.value:.3f}, predicted {theirs.value:.3f} ({low:.3f} to {high:.3f})"
            )
    if not off:
        return Agreement(
            agrees=True, reason=f"all {len(figures)} figures lie in the intervals of the prediction"
        )
    return Agreement(agrees=False, reason=f"{'; '.join(off)}; {_reasons(config)}")


def _reasons(config: ServedConfig) -> str:
    reasons = {
        "vllm": "known reasons: another numeric type than the prediction's, a running server that drafts "
        "otherwise than num_speculative_tokens and drafting say, blocks behind a text's end",
        "llamacpp": "known reasons: a quantised target or draft, --spec-draft-p-min above 0, "
        "--spec-draft-n-max other than num_speculative_tokens",
        "sglang": "known reasons: another numeric type, thresholds of acceptance below 1, another number "
        "of steps",
        "transformers": "known reasons: the ends of texts, where it drafts fewer tokens",
    }
    return reasons[config.engine.engine]
