"""Is this draft worth serving? Texts, acceptance, cost, prediction, paired timing, verdict."""

# B texts, T positions
from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from paceline.config import StrictModel
from paceline.core import speed as speed_model
from paceline.core.bootstrap import ratio_interval
from paceline.environment import environment
from paceline.errors import UsageError
from paceline.measure.acceptance import TextScores, budgets_of, score_texts
from paceline.measure.engine_costs import EngineCosts, check_sizes, read_costs
from paceline.measure.latency import PassCosts, PassTimer
from paceline.measure.measure_config import MeasureConfig
from paceline.measure.pair import load_models, load_prompts, sample_texts
from paceline.measure.results import (
    AcceptanceRow,
    CostRow,
    GammaRow,
    IntervalRow,
    SpeedRow,
    TriedRow,
)
from paceline.measure.timing import time_best
from paceline.measure.verdict import Verdict, judge, judge_expected
from paceline.models.loading import fingerprint
from paceline.progress import Progress, silent
from paceline.rng import named_generator

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from paceline.models.contract import Model

# The prefill gives a text's first token, and a block drafts one less than is still wanted.
_FEWEST_TIMED = 3


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
    expected: IntervalRow | None = None
    """Expected speedup in the engine whose costs were given; None: our own decoder was timed."""
    timed_gammas: tuple[int, ...] = ()
    """Those whose costs the engine was timed for; between two of them they are interpolated."""
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
    costs = None
    if config.costs is not None:
        costs = read_costs(config.costs)
        config = as_served(config, costs)
    every_token = costs is not None and costs.full_vocabulary
    pair = load_models(config, progress, full_vocabulary=every_token)
    if costs is not None and config.costs is not None:
        check_sizes(costs, config.costs, *(model.num_parameters for model in pair))
    found = measure_models(*pair, load_prompts(config, pair), config, progress, costs=costs)
    prints = {
        "target_fingerprint": fingerprint(config.target),
        "draft_fingerprint": fingerprint(config.draft),
    }
    return found.model_copy(update=prints)


def as_served(config: MeasureConfig, costs: EngineCosts) -> MeasureConfig:
    """Gammas whose costs are known; drafts drawn as the engine draws them; nothing is timed.

    Raises:
        UsageError: No gamma that is asked for has known costs, or the batch size has none, or drafts
            are to be drawn in another way.
    """
    drafts = costs.proposals(config.sampling)
    if config.draft_sampling not in (None, drafts):
        raise UsageError(
            f"the costs are of {costs} drafting {costs.drafting}, which is not how draft_sampling draws; leave "
            "--draft-temperature out, or write the costs of the other way (vLLM: drafting=probabilistic)"
        )
    changes = {
        "gammas": costs.usable(config.gammas, config.concurrency),
        "draft_sampling": drafts,
        "timed_prompts": 0,
    }
    return config.model_copy(update=changes)


def measure_models(
    target: Model,
    draft: Model,
    prompts: Sequence[Sequence[int]],
    config: MeasureConfig,
    progress: Progress = silent,
    known_texts: list[list[int]] | None = None,
    costs: EngineCosts | None = None,
) -> Measurement:
    """Measure two models that are already there, on prompts that are already tokens.

    Args:
        target: Prepared for decoding.
        draft: The same.
        prompts: As tokens.
        config: What to measure.
        progress: Called as work goes on.
        known_texts: What `sample_texts` gave for the first prompts; what is added comes in there.
        costs: Of an engine, in place of passes that are timed here.
    """
    prompts = prompts[: config.num_prompts]
    completions = _write(target, prompts, config, known_texts, progress)
    ways = config.sampling, progress, config.draft_sampling
    scores = score_texts(target, draft, prompts, completions, *ways)
    acceptance = summarise_acceptance(scores, config.seed)
    budget_B = budgets_of(target, prompts, config.max_new_tokens)
    longest = int(scores.mask_BT.sum(-1).max())
    gammas = usable_gammas(config.gammas, longest, int(budget_B.max()))
    # A pass is timed in the middle of a typical text.
    middle = [*prompts[0], *completions[0]][: len(prompts[0]) + config.max_new_tokens // 2]
    if costs is None:
        passes = _time_passes(target, draft, middle, gammas, config, progress)
    else:
        passes = costs.pass_costs(gammas, config.concurrency)
    cost = _cost_row(passes, target, draft, costs)
    rows = [_gamma_row(one, scores, budget_B, acceptance, passes, cost, costs) for one in gammas]
    chosen = max(rows, key=lambda row: row.expected_speedup)
    tried, timed, expected = list[TriedRow](), None, None
    if config.timed_prompts:  # also where a loss is expected: a no-go is measured, too
        chosen, tried, timed = time_best(target, draft, prompts, rows, middle, config, progress)
    if costs is None:
        verdict = judge(acceptance, chosen, timed)
    else:
        expected = _expected(scores, budget_B, chosen, costs, config)
        verdict = judge_expected(acceptance, chosen, expected, str(costs))
    gain = timed.speedup.value if timed and verdict.decided else chosen.expected_speedup
    return Measurement(
        config=config,
        acceptance=acceptance,
        cost=cost,
        gammas=rows,
        best_gamma=chosen.gamma if gain > 1 else 0,
        tried=tried,
        speed=timed,
        expected=expected,
        timed_gammas=() if costs is None else tuple(costs.gammas),
        verdict=verdict,
        environment=environment(),
    )


def _write(
    target: Model,
    prompts: Sequence[Sequence[int]],
    config: MeasureConfig,
    known_texts: list[list[int]] | None,
    progress: Progress,
) -> list[list[int]]:
    """The target's texts of these prompts."""
    if config.timed_prompts and config.max_new_tokens < _FEWEST_TIMED:
        raise UsageError(
            f"max_new_tokens is {config.max_new_tokens}: a text of so few drafts nothing that could be "
            f"timed; ask for {_FEWEST_TIMED} or more, or leave the timing out with timed_prompts=0"
        )
    texts = [] if known_texts is None else known_texts
    sample_texts(target, prompts, config, texts, progress)
    return texts[: len(prompts)]


def _cost_row(passes: PassCosts, target: Model, draft: Model, costs: EngineCosts | None) -> CostRow:
    return CostRow(
        target_pass_s=passes.target_pass_s,
        draft_pass_s=passes.draft_pass_s,
        cost_ratio=passes.cost_ratio,
        target_parameters=target.num_parameters,
        draft_parameters=draft.num_parameters,
        engine="" if costs is None else str(costs),
    )


def _time_passes(
    target: Model,
    draft: Model,
    text: Sequence[int],
    gammas: Sequence[int],
    config: MeasureConfig,
    progress: Progress,
) -> PassCosts:
    timer = PassTimer(target, draft, text, gammas, config.sampling, config.draft_sampling)
    for number in range(config.pass_repeats):
        timer.time_once()
        progress("timing passes", number + 1, config.pass_repeats)
    return timer.costs()


def _expected(
    scores: TextScores, budget_B: Tensor, row: GammaRow, costs: EngineCosts, config: MeasureConfig
) -> IntervalRow:
    """The expected speedup in an engine: the interval of tau over texts, widened by that of the costs."""
    rng = named_generator(config.seed, "expected speedup")
    tau = ratio_interval(*scores.tokens_and_blocks(row.gamma, budget_B), rng=rng)
    least, most = costs.error_of_block(row.gamma, config.concurrency)
    value = row.expected_speedup
    low, high = value * tau.low / tau.value / most, value * tau.high / tau.value / least
    return IntervalRow(value=value, low=low, high=high)


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
    cost: CostRow,
    engine: EngineCosts | None,
) -> GammaRow:
    tokens_B, blocks_B = scores.tokens_and_blocks(gamma, budget_B)
    tau = float(tokens_B.sum() / blocks_B.sum())
    drafted = scores.drafted_per_block(gamma, budget_B)
    alpha = min(max(acceptance.expected_acceptance.value, 0.0), 1.0)
    drafting, block = costs.drafting_cost_ratio(gamma), costs.block_cost_ratio(gamma)
    in_full = engine is not None and engine.drafts_in_full
    break_even = speed_model.break_even_acceptance(gamma, drafting, block)
    return GammaRow(
        gamma=gamma,
        block_efficiency_iid=speed_model.block_efficiency_iid(alpha, gamma),
        block_efficiency=tau,
        drafted_per_block=drafted,
        break_even_acceptance=None if math.isinf(break_even) else break_even,
        # an engine's c is that of this gamma: what it adds to a step is not the draft's pass alone
        predicted_speedup=speed_model.predicted_speedup(
            tau, gamma, drafting if engine else costs.cost_ratio
        ),
        mbsu=speed_model.mbsu(tau, gamma, cost.draft_parameters / cost.target_parameters),
        drafting_cost_ratio=drafting,
        block_cost_ratio=block,
        expected_speedup=costs.expected_speedup(tau, gamma, None if in_full else drafted),
        block_s=costs.block_s(gamma),
    )
