"""Measures whether a draft is worth serving: acceptance, cost, speedup, verdict."""

# B texts, T positions
from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from pydantic import ConfigDict, Field

from paceline.config import StrictModel
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
from paceline.results.figures import FIGURES
from paceline.results.row import Row, Source

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from paceline.core.text_scores import TextScores
    from paceline.measure.latency import PairedTimes, PassCosts
    from paceline.models.contract import Model
    from paceline.results.row import Label

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
    """Result of a measurement, with its configuration; its figures are those of `rows()`."""

    model_config = ConfigDict(serialize_by_alias=True)

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
    result_rows: list[Row] = Field(default_factory=list[Row], alias="rows")

    def rows(self) -> list[Row]:
        """Result rows: of the scored texts without gamma, then by gamma; then of timed requests.

        The units are the numbers of the prompts. Rows of texts have the sums of acceptance, and by
        gamma also those of blocks and the costs of a block as totals. The row of timed requests has
        the setting `timed`.
        """
        return self.result_rows


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
    marks = {name: fingerprint(getattr(config, name)) for name in ("target", "draft")}
    source = measurement.rows()[0].source.model_copy(update={"fingerprints": marks})
    rows = [row.model_copy(update={"source": source}) for row in measurement.rows()]
    named = {f"{name}_fingerprint": mark for name, mark in marks.items()}
    return measurement.model_copy(update=named | {"result_rows": rows})


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
    sizes = {"target": target.num_parameters, "draft": draft.num_parameters}
    scored = _row_of_texts(texts, config, Source.here("measure", sizes=sizes))
    acceptance = texts.acceptance(scored, config.seed)
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
    served = {"engine": costs.engine, "concurrency": config.concurrency} if costs.engine else {}
    scored = scored.extended({}, _pass_costs(costs), **served)
    of_gammas = [_row_of_gamma(scored, gamma, texts, costs) for gamma in gammas]
    rows = [_gamma_row(row) for row in of_gammas]
    tried, timed, speed, expected = list[TriedRow](), None, None, None
    if engine is None and architecture is not None:
        chosen, verdict = rows[0], not_timed(acceptance, architecture)
    elif config.timed_prompts and engine is None:  # also if no speedup is expected
        chosen, tried, costs, times = _time_best(
            target, draft, prompts, rows, begun, config, progress
        )
        timed = _row_of_requests(scored, chosen, costs, times, config.timed_prompts)
        speed = _speed_row(timed, chosen, costs, times, config.seed)
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
        rows=[scored, *of_gammas, *([] if timed is None else [timed])],
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

    def acceptance(self, row: Row, seed: int) -> AcceptanceRow:
        """Means over the tokens of all texts, with intervals over texts; `row`: of these texts."""
        by_position_T = self.scores.acceptance_BT.sum(0) / self.scores.mask_BT.sum(0).clamp(min=1)
        names = ("expected_acceptance", "greedy_draft_acceptance", "greedy_agreement")
        return AcceptanceRow(
            num_prompts=len(self.length_B),
            num_tokens=int(self.length_B.sum()),
            acceptance_by_position=[float(mean) for mean in by_position_T],
            **{name: IntervalRow.of(FIGURES[name].measure(row, seed=seed)) for name in names},
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


def _row_of_texts(texts: ScoredTexts, config: MeasureConfig, source: Source) -> Row:
    scores = texts.scores
    parts = {
        "tokens": scores.mask_BT,
        "acceptance": scores.acceptance_BT,
        "greedy_acceptance": scores.greedy_draft_BT,
        "agreement": scores.agreement_BT,
    }
    setting: dict[str, Label] = {"draft": config.draft, **config.sampling.setting}
    if config.draft_sampling is not None:
        setting["draft_temperature"] = config.draft_sampling.temperature
    setting["parameter_ratio"] = source.sizes["draft"] / source.sizes["target"]
    return Row(
        population=f"prompts of {config.prompts.path}",
        units=tuple(range(len(texts.length_B))),
        setting=setting,
        sums={name: _each(part_BT.sum(-1)) for name, part_BT in parts.items()},
        source=source,
    )


def _pass_costs(costs: PassCosts) -> dict[str, float]:
    if math.isnan(costs.target_pass_s):
        return {}
    names = ("target_pass_s", "draft_pass_s", "cost_ratio", "target_start_s", "draft_start_s")
    return {name: value for name in names if (value := getattr(costs, name)) is not None}


def _row_of_gamma(row: Row, gamma: int, texts: ScoredTexts, costs: PassCosts) -> Row:
    """The row of the texts with the blocks of gamma tokens, and what these cost."""
    drafted = texts.drafted_per_block(gamma)
    tokens_B, blocks_B = texts.tokens_and_blocks(gamma)
    totals = {"drafted_per_block": drafted} | costs.totals(gamma, drafted)
    return row.extended({"emitted": tokens_B, "calls": blocks_B}, totals, gamma=gamma)


def _each(values_B: Tensor) -> tuple[float, ...]:
    return tuple(map(float, values_B))


def _gamma_row(row: Row) -> GammaRow:
    names = ("block_efficiency_iid", "block_efficiency", "mbsu", "predicted_speedup")
    names += ("break_even_acceptance", "block_cost_ratio", "expected_speedup")
    figures = {name: FIGURES[name].value(row) for name in names if FIGURES[name].is_in(row)}
    kept = ("drafted_per_block", "drafting_cost_ratio", "block_s")
    gamma = int(row.setting["gamma"])
    return GammaRow(gamma=gamma, **figures, **{k: row.totals[k] for k in kept if k in row.totals})


def _time_best(
    target: Model,
    draft: Model,
    prompts: Sequence[Sequence[int]],
    rows: Sequence[GammaRow],
    begun: Sequence[int],
    config: MeasureConfig,
    progress: Progress,
) -> tuple[GammaRow, list[TriedRow], PassCosts, PairedTimes]:
    """Choose and time gamma, on separate requests; passes are timed between the requests.

    `begun`: tokens after the first prompt, before the timed passes.

    Returns:
        The row of this gamma, all tried gammas, the costs of passes and the times.
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
    return best.row, [candidate.figures() for candidate in tried], timer.costs(), times


def _row_of_requests(
    row: Row, best: GammaRow, costs: PassCosts, times: PairedTimes, timed_prompts: int
) -> Row:
    """The row of timed requests, with the costs of passes that were timed between them.

    The first of the timed prompts chose gamma.
    """
    units = row.units[:timed_prompts][-len(times.counts) :]
    totals = _pass_costs(costs) | {"scored_block_efficiency": best.block_efficiency}
    setting = row.setting | {"gamma": best.gamma, "timed": "requests"}
    return row.model_copy(
        update={"units": units, "setting": setting, "sums": times.sums, "totals": totals}
    )


def _speed_row(
    row: Row, best: GammaRow, costs: PassCosts, times: PairedTimes, seed: int
) -> SpeedRow:
    speedup, decoding = (
        IntervalRow.of(FIGURES[name].measure(row, seed=seed))
        for name in ("speedup", "decoding_speedup")
    )
    names = ("measured_over_predicted", "engine_efficiency", "block_efficiency", "acceptance_rate")
    return SpeedRow(
        gamma=best.gamma,
        num_requests=len(row.units),
        num_tokens=sum(times.method.tokens),
        cost_ratio=costs.cost_ratio,
        predicted_speedup=costs.predicted_speedup(best.block_efficiency, best.gamma),
        baseline_tokens_per_s=times.baseline.tokens_per_s,
        speculative_tokens_per_s=times.method.tokens_per_s,
        speedup=speedup,
        decoding_speedup=decoding,
        **{name: FIGURES[name].value(row) for name in names},
    )
