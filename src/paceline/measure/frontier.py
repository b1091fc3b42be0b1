"""The predicted frontier: what each rule at each threshold would cost and save, without decoding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from paceline.config import StrictModel
from paceline.core.rules import (
    AnyRule,
    BiLDRule,
    Chow,
    ChowLog,
    Diff,
    DiffLog,
    Lenient,
    Lossless,
    Lossy,
    Opt,
    OptLog,
    TokenV1,
    TokenV2,
    TokenV3,
)
from paceline.core.sampling import SamplingParams
from paceline.core.speed import predicted_speedup
from paceline.data import CorpusConfig, read_prompts
from paceline.decode import AutoregressiveDecoder
from paceline.errors import UsageError
from paceline.measure.analysis import analyze_rules
from paceline.measure.latency import PassTimer
from paceline.measure.results import IntervalRow
from paceline.models import load_model
from paceline.models.vocabulary import check_same_vocabulary
from paceline.progress import Progress, silent
from paceline.records import environment

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.measure.analysis import RuleRow
    from paceline.measure.latency import PassCosts
    from paceline.models.session import Model

DEFAULT_RULES: tuple[AnyRule, ...] = (
    Lossless(),
    *(Lenient("linear", epsilon) for epsilon in (0.8, 0.6, 0.4, 0.2, 0.1)),
    *(Lenient("square", epsilon) for epsilon in (0.8, 0.6, 0.4)),
    *(Lenient("exponential", epsilon) for epsilon in (0.8, 0.6, 0.4, 0.2)),
    *(Lossy(alpha, "tuned") for alpha in (0.2, 0.4, 0.6, 0.8, 0.9)),
    *(BiLDRule(threshold) for threshold in (1.0, 2.0, 3.0, 5.0, 8.0)),
    *(Chow(alpha) for alpha in (0.2, 0.4, 0.6, 0.8, 0.9, 1.0)),
    *(ChowLog(alpha) for alpha in (0.5, 1.0, 2.0, 3.0, 4.0)),
    *(Diff(alpha) for alpha in (-0.4, -0.2, 0.0, 0.1, 0.2, 0.4, 0.6)),
    *(DiffLog(alpha) for alpha in (-2.0, -1.0, 0.0, 0.5, 1.0, 2.0)),
    *(Opt(alpha) for alpha in (-0.4, 0.0, 0.2, 0.4, 0.6, 0.9)),
    *(OptLog(alpha) for alpha in (-2.0, 0.0, 1.0, 2.0, 4.0)),
    *(TokenV1(alpha) for alpha in (0.0, 0.2, 0.4, 0.6)),
    *(TokenV2(alpha) for alpha in (0.0, 0.1, 0.2, 0.4, 0.6)),
    *(TokenV3(alpha) for alpha in (0.0, 0.2, 0.4, 0.6, 0.8, 0.9, 0.97)),
)


class AnalyzeConfig(StrictModel):
    """What to analyse, and on whose text."""

    target: str
    draft: str
    prompts: CorpusConfig
    num_prompts: int = Field(default=16, ge=1)
    max_prompt_tokens: int | None = Field(default=None, ge=1)
    max_new_tokens: int = Field(default=64, ge=1)
    sampling: SamplingParams = SamplingParams()
    text: Literal["target", "draft"] = "target"
    """Who writes the text. A rule's own text lies between the two."""
    rules: tuple[Annotated[AnyRule, Field(discriminator="rule")], ...] = DEFAULT_RULES
    gammas: tuple[Annotated[int, Field(ge=1)], ...] = Field(default=(1, 2, 3, 4, 5), min_length=1)
    pass_repeats: int = Field(default=15, ge=1)
    batch_size: int = Field(default=16, ge=1)
    seed: int = 0
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = "auto"
    draft_weights: Literal["auto", "int8"] = "auto"


class FrontierRow(StrictModel):
    """One rule at one threshold."""

    rule: Annotated[AnyRule, Field(discriminator="rule")]
    rejection_rate: IntervalRow
    tvd: float
    """Mean TVD of what the rule induces to the target's distribution."""
    kl: float | None
    """Mean KL(target || induced), nats; None where it is infinite."""
    block_efficiency: dict[int, float]
    best_gamma: int
    predicted_speedup: float
    """At the best gamma: tau / (c gamma + block cost), measured passes."""


class Frontier(StrictModel):
    """All rows, in the order of the configuration, and what they were computed from."""

    schema_version: int = 1
    config: AnalyzeConfig
    num_tokens: int
    cost_ratio: float
    block_cost_ratios: dict[int, float]
    rows: list[FrontierRow]
    environment: dict[str, object]


def analyze(config: AnalyzeConfig, progress: Progress = silent) -> Frontier:
    """Load both models, write text, and see what every rule would do with it.

    Raises:
        UsageError: a model, a prompt file or the pair of tokenizers cannot be used.
    """
    target = load_model(config.target, dtype=config.dtype, device=config.device)
    if target.tokenizer is None:
        raise UsageError(f"{config.target} has no tokenizer; put its tokenizer files beside it")
    prompts = read_prompts(config.prompts, target.tokenizer, max_tokens=config.max_prompt_tokens)
    draft = load_model(config.draft, dtype=config.dtype, device=config.device)
    check_same_vocabulary(target, draft)
    ready = draft.prepare_for_decoding(config.draft_weights)
    return analyze_models(target.prepare_for_decoding(), ready, prompts, config, progress)


def analyze_models(
    target: Model,
    draft: Model,
    prompts: Sequence[Sequence[int]],
    config: AnalyzeConfig,
    progress: Progress = silent,
) -> Frontier:
    """Analyse two models that are already there, on prompts that are already tokens."""
    prompts = prompts[: config.num_prompts]
    texts = _write(draft if config.text == "draft" else target, prompts, config, progress)
    longest = max(len(text) for text in texts)
    gammas = [gamma for gamma in config.gammas if gamma <= longest]
    if not gammas:
        raise UsageError(
            f"the longest text has {longest} tokens, shorter than every gamma asked for "
            f"({min(config.gammas)} and more); ask for smaller gammas or more new tokens"
        )
    timer = PassTimer(target, draft, [*prompts[0], *texts[0]], gammas)
    for number in range(config.pass_repeats):
        timer.time_once()
        progress("timing passes", number + 1, config.pass_repeats)
    costs = timer.costs()
    found = analyze_rules(
        target, draft, prompts, texts, config.rules, config.sampling, gammas, config.seed, progress
    )
    return Frontier(
        config=config,
        num_tokens=sum(len(text) for text in texts),
        cost_ratio=costs.cost_ratio,
        block_cost_ratios={gamma: costs.block_cost_ratio(gamma) for gamma in gammas},
        rows=[_row(rule, row, costs) for rule, row in zip(config.rules, found, strict=True)],
        environment=environment(),
    )


def _write(
    writer: Model, prompts: Sequence[Sequence[int]], config: AnalyzeConfig, progress: Progress
) -> list[list[int]]:
    decoder = AutoregressiveDecoder(writer, config.sampling)
    texts: list[list[int]] = []
    for start in range(0, len(prompts), config.batch_size):
        batch = prompts[start : start + config.batch_size]
        written = decoder.generate(batch, config.max_new_tokens, seed=config.seed + start)
        texts += [generation.tokens for generation in written]
        progress("writing text", len(texts), len(prompts))
    return texts


def _row(rule: AnyRule, row: RuleRow, costs: PassCosts) -> FrontierRow:
    speedups = {
        gamma: predicted_speedup(tau, gamma, costs.cost_ratio, costs.block_cost_ratio(gamma))
        for gamma, tau in row.block_efficiency.items()
    }
    best = max(speedups, key=lambda gamma: speedups[gamma])
    return FrontierRow(
        rule=rule,
        rejection_rate=IntervalRow.of(row.rejection_rate),
        tvd=row.tvd,
        kl=row.kl if row.kl < float("inf") else None,
        block_efficiency=row.block_efficiency,
        best_gamma=best,
        predicted_speedup=speedups[best],
    )
