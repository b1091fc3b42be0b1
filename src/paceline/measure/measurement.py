"""Measures whether a draft is worth serving: acceptance, cost, speedup, verdict."""

# B texts, T positions
from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from pydantic import Field

from paceline.config import StrictModel
from paceline.core import speed as speed_model
from paceline.data.input_checks import InputChecks, checked
from paceline.decode import AutoregressiveDecoder, SpeculativeDecoder
from paceline.environment import environment
from paceline.errors import UsageError
from paceline.measure.acceptance import budgets_of, score_texts
from paceline.measure.engine_costs import EngineCosts, WithCosts, load_models_of, read_costs
from paceline.measure.latency import (
    Candidate,
    PassTimer,
    UnknownCosts,
    candidates,
    choose_gamma,
    has_room,
    num_choosing,
    time_pairs,
)
from paceline.measure.pair import PairConfig, load_prompts, sample_texts
from paceline.measure.prompt_checks import check_costs, check_prompts
from paceline.measure.results import (
    AcceptanceRow,
    CostRow,
    GammaRow,
    IntervalRow,
    SpeedRow,
    TriedRow,
)
from paceline.measure.verdict import Verdict, decide, decide_by_expected, expected_speeds, not_timed
from paceline.models.compatibility import without_rollback
from paceline.models.loading import fingerprint
from paceline.progress import Progress, silent
from paceline.rng import named_generator

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from paceline.core.text_scores import TextScores
    from paceline.measure.latency import PassCosts
    from paceline.models.contract import Model

# The prefill gives the first token, and a block leaves one token of the budget to the target.
_MIN_TIMED_TOKENS = 3


class MeasureConfig(WithCosts, PairConfig):
    """Configuration of `measure`.

    Attributes:
        timed_prompts: Number of timed requests, including those that choose gamma; 0: no timing.
    """

    num_prompts: int = Field(default=32, ge=1)
    gammas: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        default=(1, 2, 3, 4, 5, 6, 8), min_length=1
    )
    pass_repeats: int = Field(default=31, ge=1)
    timed_prompts: int = Field(default=16, ge=0)
    timed_repeats: int = Field(default=1, ge=1)

    def check(self) -> InputChecks:
        """Check the inputs; raises UsageError."""
        checks = InputChecks()
        checks.device(self.device)
        check_costs(checks, self, self.gammas)
        models = checks.pair(self.target, self.draft)
        num_timed = 0 if self.costs is not None else min(self.timed_prompts, self.num_prompts)
        # a timed request is decoded in full, and its last block needs up to gamma extra positions
        timed = num_timed, self.max_new_tokens + min(self.gammas)
        check_prompts(checks, self, models, new_tokens=1, timed=timed)
        return checks


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
    pair = load_models_of(config, costs, progress)
    prompts = load_prompts(config, pair)
    measurement = measure_models(*pair, prompts, config, progress, engine=costs)
    fingerprints = {
        "target_fingerprint": fingerprint(config.target),
        "draft_fingerprint": fingerprint(config.draft),
    }
    return measurement.model_copy(update=fingerprints)


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
    engine: EngineCosts | None = None,
) -> Measurement:
    """Measure two models, loaded and prepared for decoding, on tokenized prompts.

    `known_texts`: texts from `sample_texts` for the first prompts; missing ones are appended.
    `engine`: costs of an engine, used instead of timing passes.
    """
    if config.timed_prompts and config.max_new_tokens < _MIN_TIMED_TOKENS:
        raise UsageError(
            f"max_new_tokens is {config.max_new_tokens}, too few to draft and time a block; "
            f"ask for {_MIN_TIMED_TOKENS} or more, or skip the timing with timed_prompts=0"
        )
    prompts = prompts[: config.num_prompts]
    completions = [] if known_texts is None else known_texts
    sample_texts(target, prompts, config, completions, progress)
    completions = completions[: len(prompts)]
    texts = ScoredTexts.of(target, draft, prompts, completions, config, progress)
    acceptance = texts.acceptance(config.seed)
    gammas = texts.usable_gammas(config.gammas)
    # passes and requests are timed in the middle of a typical text
    begun = completions[0][: config.max_new_tokens // 2]
    samplings = config.sampling, config.draft_sampling
    architecture = without_rollback(target, draft)
    if engine is not None:
        costs = engine.step_costs(gammas, config.concurrency)
    elif architecture is not None:
        costs = UnknownCosts()
    else:
        timer = PassTimer(target, draft, prompts[0], gammas, *samplings, begun)
        costs = timer.run(config.pass_repeats, progress)
    cost = _cost_row(target, draft, costs)
    rows = [_gamma_row(gamma, texts, acceptance, cost, costs) for gamma in gammas]
    tried, speed, expected = list[TriedRow](), None, None
    if engine is None and architecture is not None:
        chosen, verdict = rows[0], not_timed(acceptance, architecture)
    elif config.timed_prompts and engine is None:  # also if no speedup is expected
        chosen, tried, speed = _time_best(target, draft, prompts, rows, begun, config, progress)
        verdict = decide(acceptance, chosen, speed)
    else:
        counts = [texts.tokens_and_blocks(gamma) for gamma in gammas]
        speeds = expected_speeds(rows, counts, costs, seed=config.seed)
        best, verdict = decide_by_expected(acceptance, speeds, costs)
        chosen, expected = best.row, IntervalRow.of(best.speedup)
    return Measurement(
        config=config,
        acceptance=acceptance,
        cost=cost,
        gammas=rows,
        best_gamma=chosen.gamma if verdict.go else 0,
        tried=tried,
        speed=speed,
        expected=expected,
        timed_gammas=costs.timed_gammas,
        verdict=verdict,
        environment=environment(),
    )


class ScoredTexts(NamedTuple):
    """Texts of the target, scored with both models.

    Attributes:
        scores: At each position.
        length_B: Number of tokens of each text.
        budget_B: Maximum number of tokens of each text.
    """

    scores: TextScores
    length_B: Tensor
    budget_B: Tensor

    @classmethod
    def of(
        cls,
        target: Model,
        draft: Model,
        prompts: Sequence[Sequence[int]],
        completions: Sequence[Sequence[int]],
        config: PairConfig,
        progress: Progress,
    ) -> ScoredTexts:
        settings = config.sampling, progress, config.draft_sampling
        scores = score_texts(target, draft, prompts, completions, *settings)
        budget_B = budgets_of(target, prompts, config.max_new_tokens)
        return cls(scores, scores.mask_BT.sum(-1), budget_B)

    def tokens_and_blocks(self, gamma: int) -> tuple[Tensor, Tensor]:
        """Expected tokens and blocks of each text, [B] each."""
        return self.scores.tokens_and_blocks(gamma, self.budget_B)

    def drafted_per_block(self, gamma: int) -> float:
        """Mean number of drafted tokens per block; below gamma if budgets end within blocks."""
        return self.scores.drafted_per_block(gamma, self.budget_B)

    def usable_gammas(self, gammas: Sequence[int]) -> list[int]:
        """See `usable_gammas`."""
        return usable_gammas(gammas, int(self.length_B.max()), int(self.budget_B.max()))

    def mean(self, score_BT: Tensor, seed: int) -> IntervalRow:
        """Mean over the tokens of all texts of a score in [0, 1], with its interval over texts."""
        rng = named_generator(seed, "bootstrap")
        return IntervalRow.of_ratio(score_BT.sum(-1), self.length_B, rng, most=1.0)

    def acceptance(self, seed: int) -> AcceptanceRow:
        """Means over the tokens of all texts, with intervals over texts."""
        scores = self.scores
        reached_T = scores.mask_BT.sum(0)
        by_position_T = scores.acceptance_BT.sum(0) / reached_T.clamp(min=1)
        return AcceptanceRow(
            num_prompts=len(self.length_B),
            num_tokens=int(self.length_B.sum()),
            expected_acceptance=self.mean(scores.acceptance_BT, seed),
            greedy_draft_acceptance=self.mean(scores.greedy_draft_BT, seed),
            greedy_agreement=self.mean(scores.agreement_BT, seed),
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


def _cost_row(target: Model, draft: Model, costs: PassCosts) -> CostRow:
    return CostRow(
        target_pass_s=costs.target_pass_s,
        draft_pass_s=costs.draft_pass_s,
        cost_ratio=costs.cost_ratio,
        target_parameters=target.num_parameters,
        draft_parameters=draft.num_parameters,
        engine=costs.engine,
        target_start_s=costs.target_start_s,
        draft_start_s=costs.draft_start_s,
    )


def _gamma_row(
    gamma: int, texts: ScoredTexts, acceptance: AcceptanceRow, cost: CostRow, costs: PassCosts
) -> GammaRow:
    tokens_B, blocks_B = texts.tokens_and_blocks(gamma)
    tau = float(tokens_B.sum() / blocks_B.sum())
    drafted = texts.drafted_per_block(gamma)
    alpha = min(max(acceptance.expected_acceptance.value, 0.0), 1.0)
    return GammaRow(
        gamma=gamma,
        block_efficiency_iid=speed_model.block_efficiency_iid(alpha, gamma),
        block_efficiency=tau,
        drafted_per_block=drafted,
        mbsu=speed_model.mbsu(tau, gamma, cost.draft_parameters / cost.target_parameters),
        **costs.figures(gamma, tau, drafted),
    )


def _time_best(
    target: Model,
    draft: Model,
    prompts: Sequence[Sequence[int]],
    rows: Sequence[GammaRow],
    begun: Sequence[int],
    config: MeasureConfig,
    progress: Progress,
) -> tuple[GammaRow, list[TriedRow], SpeedRow]:
    """Choose and time gamma, on separate requests; passes are timed between the requests.

    `begun`: tokens after the first prompt, before the timed passes.

    Returns:
        The row of this gamma, all tried gammas, and its timing.
    """
    prompts, length = prompts[: config.timed_prompts], config.max_new_tokens

    def timed(row: GammaRow) -> Candidate:
        settings = None, row.gamma, config.sampling
        drafts = config.draft_sampling
        return Candidate(row, SpeculativeDecoder(target, draft, *settings, draft_sampling=drafts))

    def fits(candidate: Candidate) -> bool:
        return all(has_room(candidate.decoder, prompt, length) for prompt in prompts)

    best, *others = map(timed, candidates(rows))
    others = [candidate for candidate in others if fits(candidate)]
    choosing = num_choosing(len(prompts)) if others and fits(best) else 0
    tried = [best, *others] if choosing else []
    if choosing:
        best = choose_gamma(
            tried,
            prompts[:choosing],
            max_new_tokens=length,
            seed=config.seed + len(prompts) * config.timed_repeats,  # not used by time_pairs
            progress=progress,
        )
    samplings = config.sampling, config.draft_sampling
    timer = PassTimer(target, draft, prompts[0], [], *samplings, begun)
    times = time_pairs(
        AutoregressiveDecoder(target, config.sampling),
        best.decoder,
        prompts[choosing:],
        max_new_tokens=length,
        seed=config.seed,
        num_repeats=config.timed_repeats,
        progress=progress,
        between=timer.time_once,
    )
    num_requests = len(prompts) - choosing
    for _ in range(config.pass_repeats - num_requests * config.timed_repeats):
        timer.time_once()
    rng = named_generator(config.seed, "bootstrap-speed")
    decoding = IntervalRow.of(times.decoding_speedup(rng))
    costs, tau = timer.costs(), times.stats.block_efficiency
    predicted = costs.predicted_speedup(best.row.block_efficiency, best.row.gamma)
    speed = SpeedRow(
        gamma=best.row.gamma,
        num_requests=num_requests,
        num_tokens=sum(times.method.tokens),
        speedup=IntervalRow.of(times.speedup(rng)),
        decoding_speedup=decoding,
        cost_ratio=costs.cost_ratio,
        predicted_speedup=predicted,
        measured_over_predicted=decoding.value / predicted,
        engine_efficiency=decoding.value / costs.predicted_speedup(tau, best.row.gamma),
        baseline_tokens_per_s=times.baseline.tokens_per_s,
        speculative_tokens_per_s=times.method.tokens_per_s,
        block_efficiency=tau,
        acceptance_rate=times.stats.acceptance_rate,
    )
    return best.row, [candidate.figures() for candidate in tried], speed
