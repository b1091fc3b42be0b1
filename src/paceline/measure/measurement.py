"""Measures whether a draft is worth serving: acceptance, cost, speedup, verdict."""

# B texts, T positions
from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

from paceline.config import StrictModel
from paceline.core import speed as speed_model
from paceline.core.bootstrap import ratio_interval
from paceline.data.input_checks import checked
from paceline.environment import environment
from paceline.errors import UsageError
from paceline.measure.acceptance import TextScores, budgets_of, score_texts
from paceline.measure.engine_costs import EngineCosts, check_sizes, read_costs
from paceline.measure.expected_speed import errors_of, expected_speeds
from paceline.measure.latency import PassTimer
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
from paceline.measure.verdict import Verdict, judge, judge_expected, not_timed
from paceline.models.compatibility import without_rollback
from paceline.models.loading import fingerprint
from paceline.progress import Progress, silent
from paceline.rng import named_generator

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from paceline.measure.latency import PassCosts
    from paceline.models.contract import Model

# The prefill gives the first token, and a block leaves one token of the budget to the target.
_MIN_TIMED_TOKENS = 3


class Measurement(StrictModel):
    """Result of a measurement, with its configuration."""

    schema_version: Literal[1] = 1
    kind: Literal["measure"] = "measure"
    config: MeasureConfig
    acceptance: AcceptanceRow
    cost: CostRow
    gammas: list[GammaRow]
    best_gamma: int
    """The gamma to serve, that of the verdict; above 0 exactly if the verdict is GO."""
    tried: list[TriedRow]
    """Gammas timed to choose the one of `speed`; empty if only the expected best was timed."""
    speed: SpeedRow | None
    expected: IntervalRow | None = None
    """Expected speedup at the gamma of the verdict, with an interval that holds for the best of all
    gammas; None if requests were timed, or blocks cannot be."""
    timed_gammas: tuple[int, ...] = ()
    """Gammas with measured costs in the engine; those between are interpolated."""
    verdict: Verdict
    environment: dict[str, object]
    target_fingerprint: str = ""
    """Fingerprint of the model's files; empty for models in memory."""
    draft_fingerprint: str = ""


def measure(config: MeasureConfig, progress: Progress = silent) -> Measurement:
    """Load both models and measure them.

    Raises:
        UsageError: a model, a prompt file or the pair of tokenizers cannot be used.
    """
    checked(config)
    costs = None
    if config.costs is not None:
        costs = read_costs(config.costs)
        config = as_served(config, costs)
    full_vocabulary = costs is not None and costs.full_vocabulary
    pair = load_models(config, progress, full_vocabulary=full_vocabulary)
    if costs is not None and config.costs is not None:
        check_sizes(costs, config.costs, *(model.num_parameters for model in pair))
    found = measure_models(*pair, load_prompts(config, pair), config, progress, costs=costs)
    return found.model_copy(
        update={
            "target_fingerprint": fingerprint(config.target),
            "draft_fingerprint": fingerprint(config.draft),
        }
    )


def as_served(config: MeasureConfig, costs: EngineCosts) -> MeasureConfig:
    """The configuration with the engine's gammas and draft sampling, and without timing.

    Raises:
        UsageError: The costs lack the gammas or the batch size, or have other draft sampling.
    """
    drafts = costs.proposals(config.sampling)
    if config.draft_sampling not in (None, drafts):
        raise UsageError(
            f"the costs are of {costs} with {costs.drafting} drafting, but draft_sampling differs; "
            "leave --draft-temperature out, or write the costs with the other drafting "
            "(vLLM: drafting=probabilistic)"
        )
    gammas = costs.usable(config.gammas, config.concurrency)
    changes = {"gammas": gammas, "draft_sampling": drafts, "timed_prompts": 0}
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
    """Measure two models, loaded and prepared for decoding, on tokenized prompts.

    `known_texts`: texts from `sample_texts` for the first prompts; missing ones are appended.
    `costs`: costs of an engine, used instead of timing passes.
    """
    prompts = prompts[: config.num_prompts]
    completions = _complete(target, prompts, config, known_texts, progress)
    settings = config.sampling, progress, config.draft_sampling
    scores = score_texts(target, draft, prompts, completions, *settings)
    acceptance = summarise_acceptance(scores, config.seed)
    budget_B = budgets_of(target, prompts, config.max_new_tokens)
    longest = int(scores.mask_BT.sum(-1).max())
    gammas = usable_gammas(config.gammas, longest, int(budget_B.max()))
    begun = completions[0][: config.max_new_tokens // 2]
    if costs is None:
        passes = _passes(target, draft, prompts[0], begun, gammas, config, progress)
    else:
        passes = costs.pass_costs(gammas, config.concurrency)
    cost = _cost_row(target, draft, passes, costs)
    rows = [_gamma_row(one, scores, budget_B, acceptance, passes, cost, costs) for one in gammas]
    tried, timed, expected = list[TriedRow](), None, None
    if passes is None:
        chosen, verdict = rows[0], not_timed(acceptance, str(without_rollback(target, draft)))
    elif config.timed_prompts and costs is None:  # also if no speedup is expected
        chosen, tried, timed = time_best(target, draft, prompts, rows, begun, config, progress)
        verdict = judge(acceptance, chosen, timed)
    else:
        found = expected_speeds(
            rows,
            [scores.tokens_and_blocks(gamma, budget_B) for gamma in gammas],
            errors_of(passes, costs, config.concurrency),
            seed=config.seed,
            in_full=costs is not None and costs.drafts_in_full,
        )
        engine = () if costs is None else (str(costs), costs.remark)
        best, verdict = judge_expected(acceptance, found, config.pass_repeats, *engine)
        chosen, expected = best.row, IntervalRow.of(best.speedup)
    return Measurement(
        config=config,
        acceptance=acceptance,
        cost=cost,
        gammas=rows,
        best_gamma=chosen.gamma if verdict.go else 0,
        tried=tried,
        speed=timed,
        expected=expected,
        timed_gammas=() if costs is None else tuple(costs.gammas),
        verdict=verdict,
        environment=environment(),
    )


def _cost_row(
    target: Model, draft: Model, passes: PassCosts | None, costs: EngineCosts | None
) -> CostRow:
    sizes: dict[str, Any] = {
        "target_parameters": target.num_parameters,
        "draft_parameters": draft.num_parameters,
    }
    if passes is None:
        return CostRow(**sizes)
    return CostRow(
        target_pass_s=passes.target_pass_s,
        draft_pass_s=passes.draft_pass_s,
        cost_ratio=passes.cost_ratio,
        engine="" if costs is None else str(costs),
        target_start_s=passes.target_start_s,
        draft_start_s=passes.draft_start_s,
        **sizes,
    )


def _complete(
    target: Model,
    prompts: Sequence[Sequence[int]],
    config: MeasureConfig,
    known_texts: list[list[int]] | None,
    progress: Progress,
) -> list[list[int]]:
    if config.timed_prompts and config.max_new_tokens < _MIN_TIMED_TOKENS:
        raise UsageError(
            f"max_new_tokens is {config.max_new_tokens}, too few to draft and time a block; "
            f"ask for {_MIN_TIMED_TOKENS} or more, or skip the timing with timed_prompts=0"
        )
    texts = [] if known_texts is None else known_texts
    sample_texts(target, prompts, config, texts, progress)
    return texts[: len(prompts)]


def summarise_acceptance(scores: TextScores, seed: int) -> AcceptanceRow:
    """Means over the tokens of all texts, with intervals over texts."""
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
    """The gammas that fit the texts: blocks draft neither the first token nor the last of a budget.

    `longest`: number of tokens of the longest text; `budget`: maximum number of tokens of a text.

    Raises:
        UsageError: no gamma fits, or every text has a single token.
    """
    if longest < 2:
        raise UsageError(
            "every text has 1 token, which comes from the target's prefill, so no block drafts; "
            "use other prompts or more new tokens"
        )
    most = max(1, budget - 2)
    usable = sorted({gamma for gamma in gammas if gamma <= most})
    if not usable:
        raise UsageError(
            f"blocks draft at most {most} tokens in texts of at most {budget} tokens, but the "
            f"smallest gamma is {min(gammas)}; ask for smaller gammas or more new tokens"
        )
    return usable


def _gamma_row(
    gamma: int,
    scores: TextScores,
    budget_B: Tensor,
    acceptance: AcceptanceRow,
    costs: PassCosts | None,
    cost: CostRow,
    engine: EngineCosts | None,
) -> GammaRow:
    tokens_B, blocks_B = scores.tokens_and_blocks(gamma, budget_B)
    tau = float(tokens_B.sum() / blocks_B.sum())
    drafted = scores.drafted_per_block(gamma, budget_B)
    alpha = min(max(acceptance.expected_acceptance.value, 0.0), 1.0)
    return GammaRow(
        gamma=gamma,
        block_efficiency_iid=speed_model.block_efficiency_iid(alpha, gamma),
        block_efficiency=tau,
        drafted_per_block=drafted,
        mbsu=speed_model.mbsu(tau, gamma, cost.draft_parameters / cost.target_parameters),
        **({} if costs is None else _speeds(gamma, tau, drafted, costs, engine)),
    )


def _speeds(
    gamma: int, tau: float, drafted: float, costs: PassCosts, engine: EngineCosts | None
) -> dict[str, Any]:
    """The figures of a gamma that depend on the costs of passes."""
    drafting, block = costs.drafting_cost_ratio(gamma), costs.block_cost_ratio(gamma)
    in_full = engine is not None and engine.drafts_in_full
    break_even = speed_model.break_even_acceptance(gamma, drafting, block)
    return {
        "break_even_acceptance": None if math.isinf(break_even) else break_even,
        # an engine's c depends on gamma: it includes more than the draft's passes
        "predicted_speedup": speed_model.predicted_speedup(
            tau, gamma, drafting if engine else costs.cost_ratio
        ),
        "drafting_cost_ratio": drafting,
        "block_cost_ratio": block,
        "expected_speedup": costs.expected_speedup(tau, gamma, None if in_full else drafted),
        "block_s": costs.block_s(gamma),
    }


def _passes(
    target: Model,
    draft: Model,
    prompt: Sequence[int],
    begun: Sequence[int],
    gammas: Sequence[int],
    config: MeasureConfig,
    progress: Progress,
) -> PassCosts | None:
    """Costs of passes in the middle of a typical text; None if a model cannot roll back."""
    if without_rollback(target, draft) is not None:
        return None
    samplings = config.sampling, config.draft_sampling
    timer = PassTimer(target, draft, prompt, gammas, *samplings, generated=begun)
    return timer.run(config.pass_repeats, progress)
