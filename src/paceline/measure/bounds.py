"""Theoretical bounds beside what they bound: acceptance (theorem 4.1), regret (lemmas 5 and 7).

Theorem 4.1 of Zhou et al. 2023 bounds the sequence-level acceptance rate by the TVD on the draft's
own text. Per prompt, with A_t and E_t the TVD at position t on text of the target and of the draft
(0 after the end), T the maximum length and L the target's mean length:

    acceptance  alpha    = 1 - sum_t A_t / L
    tight                = 1 - sum_t (1 + 2 (T - t)) E_t / L          from lemma A.3
    proven               = 1 - 2 T (T / L) epsilon                    what the proof gives
    printed              = 1 - T (T / L) epsilon                      as in the paper, without the 2

epsilon is the mean over the draft's texts of their mean TVD.

Lemmas 5 and 7 of Narasimhan et al. 2024 bound the regret of OPT and OPTLog: the deferral risk of
the rule minus that of the best rule, which knows the true distribution P. Here the truth is a third
model, whose distribution is known, and its text gives the contexts.

    risk = E_{v~P}[(1 - r) loss(v, q) + r loss(v, p)] + alpha r TVD(p, q),  r = 1: defer
    lemma 5, loss(v, p) = 1{v != argmax p}:  regret <= max_v |P - q| + max_v |P - p|
    lemma 7, loss(v, p) = -log p(v):  regret <= B_q sum_v |P - q| + B_p sum_v |P - p|,
                                      B_p = max_v |log p(v)|
"""

# S samples, T positions, V vocabulary
from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, cast

import torch
from pydantic import Field, model_validator

from paceline.config import StrictModel
from paceline.core.divergences import total_variation
from paceline.core.rule_base import Position
from paceline.core.rules import Opt, OptLog
from paceline.core.sampling import to_probs
from paceline.data.input_checks import InputChecks, checked
from paceline.errors import UsageError, VocabularyMismatchError
from paceline.measure.acceptance import forced_logits, score_texts
from paceline.measure.pair import (
    PairConfig,
    after_skipped,
    load_models,
    load_prompts,
    sample_texts,
)
from paceline.measure.prompt_checks import check_prompts
from paceline.models import load_model, prepare_for_decoding
from paceline.models.compatibility import check_same_vocabulary
from paceline.models.loading import fingerprint
from paceline.progress import silent
from paceline.records import RunDirectory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from paceline.core.rules import BinaryCascade
    from paceline.core.sampling import SamplingParams
    from paceline.models import HfModel
    from paceline.models.contract import Model
    from paceline.models.inspection import ModelFacts
    from paceline.progress import Progress


class BoundsConfig(PairConfig):
    """Configuration of `bounds`.

    Attributes:
        output: Run directory.
        truth: Model whose distribution counts as the true one in the regret; None: no regret.
        alphas: Costs of deferral at which the regret is measured.
        num_prompts: Maximum number of prompts, after `skip_prompts`.
        num_samples: Texts of each model per prompt, for the expectations of the theorem.
    """

    output: Path
    truth: str | None = None
    alphas: tuple[Annotated[float, Field(ge=0)], ...] = (0.1, 0.3)
    num_prompts: int = Field(default=64, ge=1)
    skip_prompts: int = Field(default=0, ge=0)
    num_samples: int = Field(default=4, ge=1)

    @model_validator(mode="after")
    def _same_sampling(self) -> BoundsConfig:
        if self.draft_sampling not in (None, self.sampling):
            raise ValueError("the theorem is for a draft that samples as the target; remove it")
        return self

    def check(self) -> InputChecks:
        """Check the inputs; raises UsageError."""
        RunDirectory(self.output).check_kind(self)
        checks = InputChecks()
        checks.device(self.device)
        models = checks.pair(self.target, self.draft)
        if self.truth is not None:
            models.append(_check_truth(checks, self.truth, models[0]))
        check_prompts(checks, self, models, new_tokens=1, skip=self.skip_prompts)
        checks.output(self.output)
        return checks


def _check_truth(checks: InputChecks, path: str, target: ModelFacts) -> ModelFacts:
    """Check the truth, and that it shares the target's tokenizer."""
    truth = checks.model("truth", path)
    if target.tokenizer is not None and truth.tokenizer is not None:
        try:
            check_same_vocabulary(*cast("Any", (target, truth)))
        except VocabularyMismatchError:  # it would call the truth a draft
            raise UsageError(
                f"the truth {path} has another vocabulary than the target; choose a model with the "
                "target's tokenizer"
            ) from None
    return truth


class PromptBounds(StrictModel):
    """Acceptance and its bounds for one prompt, and sums of the regret over positions.

    Attributes:
        length: L, the mean length of the target's texts.
        tvd: Epsilon, the mean TVD on the draft's texts.
        positions: Number of positions of the regret.
        regret: Sum over positions, by rule and alpha, such as `opt 0.1`.
        bound: Sum of the bound, likewise.
        violations: Number of positions where the regret exceeds the bound by more than rounding.
    """

    prompt: int
    acceptance: float
    tight: float
    proven: float
    printed: float
    length: float
    tvd: float
    positions: int = 0
    regret: dict[str, float] = Field(default_factory=dict)
    bound: dict[str, float] = Field(default_factory=dict)
    violations: dict[str, int] = Field(default_factory=dict)


class BoundsResult(StrictModel):
    """All prompts; the configuration is in the manifest."""

    schema_version: int = 1
    max_new_tokens: int
    prompts: list[PromptBounds]


def bounds(config: BoundsConfig, progress: Progress = silent) -> BoundsResult:
    """Measure acceptance, regret and their bounds; writes `result.json` to the output directory.

    Raises:
        UsageError: a model or a prompt cannot be used.
    """
    checked(config)
    run = RunDirectory(config.output)
    with run.alone():
        pair = load_models(config, progress, full_vocabulary=True)
        truth = _load_truth(config, pair.target)
        prompts = load_prompts(config, pair)
        prompts = after_skipped(prompts, config.skip_prompts, config.prompts.path)
        prompts = prompts[: config.num_prompts]
        names = {"target": config.target, "draft": config.draft, "truth": config.truth}
        marks = {name: fingerprint(path) for name, path in names.items() if path is not None}
        run.write_manifest(config, inputs=marks)
        found = _acceptance(*pair, prompts, config, progress)
        if truth is not None:
            found = _with_regret(found, truth, pair, prompts, config, progress)
        result = BoundsResult(max_new_tokens=config.max_new_tokens, prompts=found)
        run.write_result(result.model_dump(mode="json"))
    return result


def _load_truth(config: BoundsConfig, target: HfModel) -> HfModel | None:
    if config.truth is None:
        return None
    truth = load_model(config.truth, dtype=target.dtype, device=config.device)
    check_same_vocabulary(target, truth)
    return prepare_for_decoding(truth)


def _acceptance(
    target: HfModel,
    draft: HfModel,
    prompts: Sequence[Sequence[int]],
    config: BoundsConfig,
    progress: Progress,
) -> list[PromptBounds]:
    repeated = [prompt for prompt in prompts for _ in range(config.num_samples)]
    tvds: list[Tensor] = []
    masks: list[Tensor] = []
    for writer in (target, draft):
        texts: list[list[int]] = []
        skipped = config.skip_prompts * config.num_samples
        sample_texts(writer, repeated, config, texts, progress, skipped=skipped)
        scores = score_texts(target, draft, repeated, texts, config.sampling, progress)
        shape = (len(prompts), config.num_samples, -1)
        masks.append(scores.mask_BT.double().reshape(shape))
        tvds.append((1 - scores.acceptance_BT.double()).reshape(shape) * masks[-1])
    return [
        theorem_bounds(
            number,
            tvds[0][number],
            masks[0][number],
            tvds[1][number],
            masks[1][number],
            config.max_new_tokens,
        )
        for number in range(len(prompts))
    ]


def theorem_bounds(
    prompt: int,
    target_tvd_ST: Tensor,
    target_mask_ST: Tensor,
    draft_tvd_ST: Tensor,
    draft_mask_ST: Tensor,
    max_length: int,
) -> PromptBounds:
    """Acceptance of one prompt and its bounds.

    Shapes: TVD at each position of S texts of the target and of the draft, 0 after their ends, and
    the masks of the texts.
    Paper: Zhou et al. 2023, theorem 4.1 and lemmas A.1 and A.3. Differs: the printed theorem lacks
    a factor of 2.
    """
    length = float(target_mask_ST.sum() / len(target_mask_ST))
    by_position_T = draft_tvd_ST.mean(0)
    left_T = max_length - 1 - torch.arange(len(by_position_T), dtype=torch.float64)
    epsilon = float((draft_tvd_ST.sum(-1) / draft_mask_ST.sum(-1)).mean())
    step = max_length * max_length / length * epsilon
    return PromptBounds(
        prompt=prompt,
        acceptance=float(1 - target_tvd_ST.sum() / target_mask_ST.sum()),
        tight=float(1 - ((1 + 2 * left_T) * by_position_T).sum() / length),
        proven=1 - 2 * step,
        printed=1 - step,
        length=length,
        tvd=epsilon,
    )


def _with_regret(
    found: Sequence[PromptBounds],
    truth: HfModel,
    pair: tuple[HfModel, HfModel],
    prompts: Sequence[Sequence[int]],
    config: BoundsConfig,
    progress: Progress,
) -> list[PromptBounds]:
    texts: list[list[int]] = []
    sample_texts(truth, prompts, config, texts, progress, skipped=config.skip_prompts)
    vocab_size = check_same_vocabulary(*pair)
    rows: list[PromptBounds] = []
    for row, prompt, text in zip(found, prompts, texts, strict=True):
        probs = [
            _probs(model, prompt, text, config.sampling, vocab_size) for model in (truth, *pair)
        ]
        regrets = {
            f"{rule.rule} {alpha:g}": regret_and_bound(rule, *probs)
            for alpha in config.alphas
            for rule in (Opt(alpha=alpha), OptLog(alpha=alpha))
        }
        rows.append(
            row.model_copy(
                update={
                    "positions": len(text),
                    "regret": {name: float(one.regret_T.sum()) for name, one in regrets.items()},
                    "bound": {name: float(one.bound_T.sum()) for name, one in regrets.items()},
                    "violations": {name: one.num_violations for name, one in regrets.items()},
                }
            )
        )
        progress("regret", len(rows), len(prompts))
    return rows


def _probs(
    model: Model,
    prompt: Sequence[int],
    text: Sequence[int],
    sampling: SamplingParams,
    vocab_size: int,
) -> Tensor:
    return to_probs(forced_logits(model, prompt, text, sampling, vocab_size), sampling).double()


class Regret(NamedTuple):
    """Regret of a rule at each position, and its bound."""

    regret_T: Tensor
    bound_T: Tensor

    @property
    def num_violations(self) -> int:
        """Number of positions where the regret exceeds the bound by more than rounding."""
        return int((self.regret_T > self.bound_T * (1 + 1e-6) + 1e-6).sum())


def regret_and_bound(
    rule: BinaryCascade, truth_TV: Tensor, target_TV: Tensor, draft_TV: Tensor
) -> Regret:
    """Regret of OPT (loss 0-1) or OPTLog (log loss) at each position, and the lemma's bound.

    Shapes: probabilities [T, V].
    Paper: Narasimhan et al. 2024, lemmas 5 and 7.
    """
    assert isinstance(rule, Opt | OptLog), "the lemmas are about these"
    losses: list[Tensor] = []
    weights: list[Tensor] = []
    for model_TV in (target_TV, draft_TV):
        if isinstance(rule, Opt):
            losses.append(1 - truth_TV.gather(-1, model_TV.argmax(-1, keepdim=True)).squeeze(-1))
            weights.append((truth_TV - model_TV).abs().amax(-1))
        else:
            log_TV = model_TV.clamp(min=torch.finfo(torch.float32).tiny).log()
            losses.append(-(truth_TV * log_TV).sum(-1))
            weights.append(log_TV.abs().amax(-1) * (truth_TV - model_TV).abs().sum(-1))
    cost_T = losses[0] + rule.alpha * total_variation(target_TV, draft_TV)
    deferred_T = rule.defers(Position.of(target_TV, draft_TV)).squeeze(-1)
    risk_T = torch.where(deferred_T, cost_T, losses[1])
    return Regret(risk_T - torch.minimum(cost_T, losses[1]), weights[0] + weights[1])
