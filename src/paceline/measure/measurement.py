"""Is this draft worth serving? Texts, acceptance, cost, prediction, paired timing, verdict."""

# B texts, T positions
from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from paceline.config import StrictModel
from paceline.core import speed as speed_model
from paceline.core.bootstrap import ratio_interval
from paceline.decode import AutoregressiveDecoder, SpeculativeDecoder
from paceline.errors import UsageError
from paceline.measure.acceptance import TextScores, budgets_of, score_texts
from paceline.measure.choosing import candidates, choose_gamma, num_choosing
from paceline.measure.latency import PassCosts, PassTimer, has_room, time_pairs
from paceline.measure.pair import PairConfig, load_models, load_prompts, sample_texts
from paceline.measure.results import (
    AcceptanceRow,
    CostRow,
    GammaRow,
    IntervalRow,
    SpeedRow,
    TriedRow,
)
from paceline.measure.verdict import Verdict, judge
from paceline.models.loading import fingerprint
from paceline.progress import Progress, silent
from paceline.records import environment
from paceline.rng import named_generator

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from paceline.models.session import Model

Gamma = Annotated[int, Field(ge=1)]
# The prefill gives a text's first token, and a block drafts one less than is still wanted.
_FEWEST_TIMED = 3


class MeasureConfig(PairConfig):
    """What to measure.

    `timed_prompts`: requests to time, those that choose gamma included; 0 leaves the timing out.
    """

    num_prompts: int = Field(default=32, ge=1)
    gammas: tuple[Gamma, ...] = Field(default=(1, 2, 3, 4, 5, 6, 8), min_length=1)
    pass_repeats: int = Field(default=31, ge=1)
    timed_prompts: int = Field(default=16, ge=0)
    timed_repeats: int = Field(default=1, ge=1)


class Measurement(StrictModel):
    """All that was found, with what it was found on."""

    schema_version: Literal[2] = 2
    config: MeasureConfig
    acceptance: AcceptanceRow
    cost: CostRow
    gammas: list[GammaRow]
    best_gamma: int
    """The gamma to serve: the timed one, else that of the largest expected speedup.

    0 where decoding without a draft is as fast or faster."""
    tried: list[TriedRow]
    """The gammas timed to choose the one of `speed`; empty where only the expected best was timed."""
    speed: SpeedRow | None
    verdict: Verdict
    environment: dict[str, object]
    target_fingerprint: str = ""
    """Of the target's files; empty for models that were handed over in memory."""
    draft_fingerprint: str = ""


def measure(config: MeasureConfig, progress: Progress = silent) -> Measurement:
    """Load both models and measure them.

    Raises:
        UsageError: a model, a prompt file or the pair of tokenizers cannot be used.
    """
    pair = load_models(config, progress)
    found = measure_models(*pair, load_prompts(config, pair), config, progress)
    prints = {
        "target_fingerprint": fingerprint(config.target),
        "draft_fingerprint": fingerprint(config.draft),
    }
    return found.model_copy(update=prints)


def measure_models(
    target: Model,
    draft: Model,
    prompts: Sequence[Sequence[int]],
    config: MeasureConfig,
    progress: Progress = silent,
    known_texts: list[list[int]] | None = None,
) -> Measurement:
    """Measure two models that are already there, on prompts that are already tokens.

    `known_texts`: what `sample_texts` gave for the first prompts; what is added comes in there.
    """
    prompts = prompts[: config.num_prompts]
    if config.timed_prompts and config.max_new_tokens < _FEWEST_TIMED:
        raise UsageError(
            f"max_new_tokens is {config.max_new_tokens}: a text of so few drafts nothing that could be "
            f"timed; ask for {_FEWEST_TIMED} or more, or leave the timing out with timed_prompts=0"
        )
    completions = [] if known_texts is None else known_texts
    sample_texts(target, prompts, config, completions, progress)
    completions = completions[: len(prompts)]
    drafts = config.draft_sampling
    scores = score_texts(target, draft, prompts, completions, config.sampling, progress, drafts)
    acceptance = summarise_acceptance(scores, config.seed)
    budget_B = budgets_of(target, prompts, config.max_new_tokens)
    longest = int(scores.mask_BT.sum(-1).max())
    gammas = usable_gammas(config.gammas, longest, int(budget_B.max()))
    # A pass is timed in the middle of a typical text.
    middle = [*prompts[0], *completions[0]][: len(prompts[0]) + config.max_new_tokens // 2]
    timer = PassTimer(target, draft, middle, gammas, config.sampling, drafts)
    for number in range(config.pass_repeats):
        timer.time_once()
        progress("timing passes", number + 1, config.pass_repeats)
    costs = timer.costs()
    parameters = target.num_parameters, draft.num_parameters
    rows = [_gamma_row(gamma, scores, budget_B, acceptance, costs, parameters) for gamma in gammas]
    expected = max(rows, key=lambda row: row.expected_speedup)
    chosen, tried, timed = expected, list[TriedRow](), None
    if config.timed_prompts:  # also where a loss is expected: a no-go is measured, too
        chosen, tried, timed = _time(target, draft, prompts, rows, middle, config, progress)
    verdict = judge(acceptance, chosen, timed)
    gain = timed.speedup.value if timed and verdict.decided else chosen.expected_speedup
    return Measurement(
        config=config,
        acceptance=acceptance,
        cost=CostRow(
            target_pass_s=costs.target_pass_s,
            draft_pass_s=costs.draft_pass_s,
            cost_ratio=costs.cost_ratio,
            target_parameters=parameters[0],
            draft_parameters=parameters[1],
        ),
        gammas=rows,
        best_gamma=chosen.gamma if gain > 1 else 0,
        tried=tried,
        speed=timed,
        verdict=verdict,
        environment=environment(),
    )


def summarise_acceptance(scores: TextScores, seed: int) -> AcceptanceRow:
    """Ratios of sums over texts, with intervals over texts."""
    lengths_B = scores.mask_BT.sum(-1)

    def interval(score_BT: Tensor) -> IntervalRow:
        rng = named_generator(seed, "bootstrap")
        return IntervalRow.of(ratio_interval(score_BT.sum(-1), lengths_B, rng=rng, most=1.0))

    reached_T = scores.mask_BT.sum(0)
    by_position_T = scores.acceptance_BT.sum(0) / reached_T.clamp(min=1)
    return AcceptanceRow(
        num_prompts=len(lengths_B),
        num_tokens=int(lengths_B.sum()),
        expected_acceptance=interval(scores.acceptance_BT),
        greedy_draft_acceptance=interval(scores.greedy_draft_BT),
        greedy_agreement=interval(scores.agreement_BT),
        acceptance_by_position=[float(mean) for mean in by_position_T],
    )


def usable_gammas(gammas: Sequence[int], longest: int, budget: int) -> list[int]:
    """The gammas that a block can draft: no block drafts the first token, nor past the budget.

    `longest`: tokens of the longest text; `budget`: the most that a text might have.

    Raises:
        UsageError: there is none, or no text has a token that a block could give.
    """
    if longest < 2:
        raise UsageError(
            "every text has 1 token, which the target's pass over the prompt gives: no block drafts; "
            "use other prompts or more new tokens"
        )
    most = max(1, budget - 2)
    usable = sorted({gamma for gamma in gammas if gamma <= most})
    if not usable:
        raise UsageError(
            f"in texts of at most {budget} tokens a block drafts at most {most}, and the smallest gamma "
            f"asked for is {min(gammas)}; ask for smaller gammas or more new tokens"
        )
    return usable


def _gamma_row(
    gamma: int,
    scores: TextScores,
    budget_B: Tensor,
    acceptance: AcceptanceRow,
    costs: PassCosts,
    parameters: tuple[int, int],
) -> GammaRow:
    tokens_B, blocks_B = scores.tokens_and_blocks(gamma, budget_B)
    tau = float(tokens_B.sum() / blocks_B.sum())
    drafted = scores.drafted_per_block(gamma, budget_B)
    alpha = min(max(acceptance.expected_acceptance.value, 0.0), 1.0)
    drafting, block = costs.drafting_cost_ratio(gamma), costs.block_cost_ratio(gamma)
    break_even = speed_model.break_even_acceptance(gamma, drafting, block)
    return GammaRow(
        gamma=gamma,
        block_efficiency_iid=speed_model.block_efficiency_iid(alpha, gamma),
        block_efficiency=tau,
        drafted_per_block=drafted,
        break_even_acceptance=None if math.isinf(break_even) else break_even,
        predicted_speedup=speed_model.predicted_speedup(tau, gamma, costs.cost_ratio),
        mbsu=speed_model.mbsu(tau, gamma, parameters[1] / parameters[0]),
        drafting_cost_ratio=drafting,
        block_cost_ratio=block,
        expected_speedup=costs.expected_speedup(tau, gamma, drafted),
    )


def _speculative(
    target: Model, draft: Model, gamma: int, config: MeasureConfig
) -> SpeculativeDecoder:
    return SpeculativeDecoder(
        *(target, draft, None, gamma, config.sampling), draft_sampling=config.draft_sampling
    )


def _time(
    target: Model,
    draft: Model,
    prompts: Sequence[Sequence[int]],
    rows: Sequence[GammaRow],
    middle: Sequence[int],
    config: MeasureConfig,
    progress: Progress,
) -> tuple[GammaRow, list[TriedRow], SpeedRow]:
    """The fastest gamma, what was tried, and its timing on requests that did not choose it."""
    asked = prompts[: config.timed_prompts]

    def decoder_of(gamma: int) -> SpeculativeDecoder:
        return _speculative(target, draft, gamma, config)

    def fits(row: GammaRow) -> bool:
        decoder = decoder_of(row.gamma)
        return all(has_room(decoder, prompt, config.max_new_tokens) for prompt in asked)

    chosen, *others = candidates(rows)
    others, tried = [row for row in others if fits(row)], list[TriedRow]()
    choosing = num_choosing(len(asked)) if others and fits(chosen) else 0
    if choosing:
        chosen, tried = choose_gamma(
            [chosen, *others],
            decoder_of,
            asked[:choosing],
            max_new_tokens=config.max_new_tokens,
            seed=config.seed + len(asked) * config.timed_repeats,  # none of the seeds below
            progress=progress,
        )
    timer = PassTimer(target, draft, middle, [], config.sampling, config.draft_sampling)
    timed = _time_requests(target, draft, asked[choosing:], chosen, timer, config, progress)
    return chosen, tried, timed


def _time_requests(
    target: Model,
    draft: Model,
    prompts: Sequence[Sequence[int]],
    chosen: GammaRow,
    timer: PassTimer,
    config: MeasureConfig,
    progress: Progress,
) -> SpeedRow:
    """Paired timing at the chosen gamma, with single passes in between to compare it with."""
    times = time_pairs(
        AutoregressiveDecoder(target, config.sampling),
        _speculative(target, draft, chosen.gamma, config),
        prompts,
        max_new_tokens=config.max_new_tokens,
        seed=config.seed,
        num_repeats=config.timed_repeats,
        progress=progress,
        between=timer.time_once,
    )
    for _ in range(config.pass_repeats - len(times.baseline_s) * config.timed_repeats):
        timer.time_once()
    rng = named_generator(config.seed, "bootstrap-speed")
    decoding = IntervalRow.of(times.decoding_speedup(rng))
    ratio, tau = timer.costs().cost_ratio, times.stats.block_efficiency
    predicted = speed_model.predicted_speedup(chosen.block_efficiency, chosen.gamma, ratio)
    reachable = speed_model.predicted_speedup(tau, chosen.gamma, ratio)
    return SpeedRow(
        gamma=chosen.gamma,
        num_requests=len(times.baseline_s),
        num_tokens=sum(times.method_tokens),
        speedup=IntervalRow.of(times.speedup(rng)),
        decoding_speedup=decoding,
        cost_ratio=ratio,
        predicted_speedup=predicted,
        measured_over_predicted=decoding.value / predicted,
        engine_efficiency=decoding.value / reachable,
        baseline_tokens_per_s=sum(times.baseline_tokens) / sum(times.baseline_s),
        speculative_tokens_per_s=sum(times.method_tokens) / sum(times.method_s),
        block_efficiency=tau,
        acceptance_rate=times.stats.acceptance_rate,
    )
