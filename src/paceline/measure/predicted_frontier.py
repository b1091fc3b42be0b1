"""Predicts quality and speedup of each rule at each threshold, without decoding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from paceline.config import StrictModel
from paceline.core import rules as core_rules
from paceline.core.rule_base import Bonus, with_bonus
from paceline.data.input_checks import InputChecks, checked
from paceline.environment import environment
from paceline.extensions import RuleChoice
from paceline.measure.analysis import analyze_rules
from paceline.measure.latency import PassCosts, PassTimer
from paceline.measure.measurement import usable_gammas
from paceline.measure.pair import PairConfig, load_models, load_prompts, sample_texts
from paceline.measure.prompt_checks import check_prompts
from paceline.measure.results import IntervalRow
from paceline.models.compatibility import without_rollback
from paceline.progress import Progress, silent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.measure.analysis import RuleRow
    from paceline.models.contract import Model

DEFAULT_RULES: tuple[RuleChoice, ...] = (
    core_rules.Lossless(),
    *(core_rules.Lenient("linear", epsilon) for epsilon in (0.8, 0.6, 0.4, 0.2, 0.1)),
    *(core_rules.Lenient("square", epsilon) for epsilon in (0.8, 0.6, 0.4)),
    *(core_rules.Lenient("exponential", epsilon) for epsilon in (0.8, 0.6, 0.4, 0.2)),
    *(core_rules.Lossy(alpha, "tuned") for alpha in (0.2, 0.4, 0.6, 0.8, 0.9)),
    *(core_rules.BiLDRule(threshold) for threshold in (1.0, 2.0, 3.0, 5.0, 8.0)),
    *(core_rules.Chow(alpha) for alpha in (0.2, 0.4, 0.6, 0.8, 0.9, 1.0)),
    *(core_rules.ChowLog(alpha) for alpha in (0.5, 1.0, 2.0, 3.0, 4.0)),
    *(core_rules.Diff(alpha) for alpha in (-0.4, -0.2, 0.0, 0.1, 0.2, 0.4, 0.6)),
    *(core_rules.DiffLog(alpha) for alpha in (-2.0, -1.0, 0.0, 0.5, 1.0, 2.0)),
    *(core_rules.Opt(alpha) for alpha in (-0.4, 0.0, 0.2, 0.4, 0.6, 0.9)),
    *(core_rules.OptLog(alpha) for alpha in (-2.0, 0.0, 1.0, 2.0, 4.0)),
    *(core_rules.TokenV1(alpha) for alpha in (0.0, 0.2, 0.4, 0.6)),
    *(core_rules.TokenV2(alpha) for alpha in (0.0, 0.1, 0.2, 0.4, 0.6)),
    *(core_rules.TokenV3(alpha) for alpha in (0.0, 0.2, 0.4, 0.6, 0.8, 0.9, 0.97)),
)


class AnalyzeConfig(PairConfig):
    """Configuration of `analyze`."""

    num_prompts: int = Field(default=16, ge=1)
    text: Literal["target", "draft"] = "target"
    """Model that generates the text. A rule's own text lies between the two."""
    rules: tuple[RuleChoice, ...] = DEFAULT_RULES
    bonus: Bonus = "rule"
    """What bonus tokens and first tokens follow: the rule, or the target, as in vLLM."""
    gammas: tuple[Annotated[int, Field(ge=1)], ...] = Field(default=(1, 2, 3, 4, 5), min_length=1)
    pass_repeats: int = Field(default=15, ge=1)

    def check(self) -> InputChecks:
        """Check the inputs; raises UsageError."""
        checks = InputChecks()
        checks.device(self.device)
        models = checks.pair(self.target, self.draft)
        check_prompts(checks, self, models, new_tokens=1)
        return checks


class FrontierRow(StrictModel):
    """One rule at one threshold."""

    rule: RuleChoice
    rejection_rate: IntervalRow
    """Rejected / examined drafted tokens at the best gamma."""
    tvd: float
    """Mean TVD of the induced distribution to the target's."""
    kl: float | None
    """Mean KL(target || induced), nats; None if infinite."""
    surprisal: float
    """Mean -log p of the induced distribution, p the untempered target, nats."""
    block_efficiency: dict[int, float]
    best_gamma: int
    predicted_speedup: float
    """At the best gamma: tau / (drafting + block cost)."""


class PredictedFrontier(StrictModel):
    """All rows, in the order of the configuration, and the costs that they use."""

    schema_version: int = 1
    config: AnalyzeConfig
    num_tokens: int
    timed: bool = True
    """False: a model cannot roll back, so blocks cannot be timed; the costs are those of MBSU."""
    cost_ratio: float
    drafting_cost_ratios: dict[int, float]
    block_cost_ratios: dict[int, float]
    rows: list[FrontierRow]
    environment: dict[str, object]


def analyze(config: AnalyzeConfig, progress: Progress = silent) -> PredictedFrontier:
    """Load both models, sample text, and analyze every rule on it.

    Raises:
        UsageError: a model, a prompt file or the pair of tokenizers cannot be used.
    """
    checked(config)
    pair = load_models(config, progress)
    return analyze_models(*pair, load_prompts(config, pair), config, progress)


def analyze_models(
    target: Model,
    draft: Model,
    prompts: Sequence[Sequence[int]],
    config: AnalyzeConfig,
    progress: Progress = silent,
) -> PredictedFrontier:
    """Analyze two loaded models on tokenized prompts."""
    prompts = prompts[: config.num_prompts]
    texts: list[list[int]] = []
    sample_texts(draft if config.text == "draft" else target, prompts, config, texts, progress)
    longest = max(len(text) for text in texts)
    gammas = usable_gammas(config.gammas, longest, config.max_new_tokens)
    timed = without_rollback(target, draft) is None
    if timed:
        # in the middle of a typical text
        begun = texts[0][: config.max_new_tokens // 2]
        samplings = config.sampling, config.draft_sampling
        timer = PassTimer(target, draft, prompts[0], gammas, *samplings, generated=begun)
        costs = timer.run(config.pass_repeats, progress)
    else:
        costs = PassCosts.of_parameters(draft.num_parameters / target.num_parameters, gammas)
    rules = [with_bonus(rule, config.bonus) for rule in config.rules]
    found = analyze_rules(
        *(target, draft, prompts, texts, rules, config.sampling, gammas),
        *(config.seed, progress, config.max_new_tokens, config.draft_sampling),
    )
    return PredictedFrontier(
        config=config,
        num_tokens=sum(len(text) for text in texts),
        timed=timed,
        cost_ratio=costs.cost_ratio,
        drafting_cost_ratios={gamma: costs.drafting_cost_ratio(gamma) for gamma in gammas},
        block_cost_ratios={gamma: costs.block_cost_ratio(gamma) for gamma in gammas},
        rows=[_row(rule, row, costs) for rule, row in zip(config.rules, found, strict=True)],
        environment=environment(),
    )


def _row(rule: RuleChoice, row: RuleRow, costs: PassCosts) -> FrontierRow:
    speedups = {
        gamma: costs.expected_speedup(tau, gamma, row.drafted_per_block[gamma])
        for gamma, tau in row.block_efficiency.items()
    }
    best = max(speedups, key=lambda gamma: speedups[gamma])
    return FrontierRow(
        rule=rule,
        rejection_rate=IntervalRow.of(row.rejection_rate[best]),
        tvd=row.tvd,
        kl=row.kl if row.kl < float("inf") else None,
        surprisal=row.surprisal,
        block_efficiency=row.block_efficiency,
        best_gamma=best,
        predicted_speedup=speedups[best],
    )
