"""Theoretical bounds beside what they bound: acceptance (theorem 4.1), regret (lemmas 1, 5 to 7).

Theorem 4.1 of Zhou et al. 2023 bounds the sequence-level acceptance rate by the TVD on the draft's
own text. Per prompt, with A_t and E_t the TVD at position t on text of the target and of the draft
(0 after the end), T the maximum length and L the target's mean length:

    acceptance  alpha    = 1 - sum_t A_t / L
    tight                = 1 - sum_t (1 + 2 (T - t)) E_t / L          from lemma A.3
    proven               = 1 - 2 T (T / L) epsilon                    what the proof gives
    printed              = 1 - T (T / L) epsilon                      as in the paper, without the 2

epsilon is the mean over the draft's texts of their mean TVD.

The lemmas of Narasimhan et al. 2024 are about the risk of a deferral rule, r = 1: defer. Each names
the best rule, which knows the true distribution P. Here the truth is a third model, whose
distribution is known, and its text gives the contexts. Regret is the risk of a plug-in rule, which
has estimates from p and q instead, less that of the best rule.

    risk = E_{v~P}[(1 - r) loss(v, q)] + r cost,    best rule: r* = 1 where E[loss(v, q)] > cost

    lemma       plug-in rules       cost of deferral
    1           Diff, DiffLog       E_{v~P}[loss(v, p)] + alpha               a sequential cascade
    6           Chow, ChowLog       alpha
    5, 7        OPT, OPTLog         E_{v~P}[loss(v, p)] + alpha TVD(p, q)     a speculative cascade

    loss(v, p) = 1{v != argmax p}:  regret <= max_v |P - q| + max_v |P - p|           (lemma 5)
    loss(v, p) = -log p(v):         regret <= B_q sum_v |P - q| + B_p sum_v |P - p|   (lemma 7),
                                    B_p = max_v |log p(v)|

The proofs of lemmas 5 and 7 bound the error of each estimate, whatever the cost of deferral, so the
same bounds are here for the rules of lemma 1, and the part of q for those of lemma 6.
"""

# S samples, T positions, V vocabulary
from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, cast

import torch
from pydantic import Field, model_validator

from paceline.config import HomePath
from paceline.core.divergences import total_variation
from paceline.core.rule_base import Position
from paceline.core.rules import Chow, ChowLog, Diff, DiffLog, Opt, OptLog
from paceline.core.sampling import to_probs
from paceline.data.input_checks import InputChecks, checked
from paceline.errors import UsageError, VocabularyMismatchError
from paceline.measure.acceptance import PairTexts, forced_logits, score_texts, within_context
from paceline.measure.pair import PairConfig, load_beside, load_models, sample_texts
from paceline.models import prepare_for_decoding
from paceline.models.compatibility import check_same_vocabulary
from paceline.models.loading import fingerprint
from paceline.progress import silent
from paceline.records import RunDirectory
from paceline.results.row import Row, Source, rounded, write_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from paceline.core.sampling import SamplingParams
    from paceline.models import HfModel
    from paceline.models.contract import Model
    from paceline.models.inspection import ModelFacts
    from paceline.progress import Progress
    from paceline.results.row import Label

    _Found = tuple[dict[str, Label], dict[str, list[float]]]  # settings, and sums by prompt

Deferral = Chow | ChowLog | Diff | DiffLog | Opt | OptLog
LEMMAS = {Diff: 1, DiffLog: 1, Opt: 5, Chow: 6, ChowLog: 6, OptLog: 7}
"""The lemma of each rule."""


class BoundsConfig(PairConfig):
    """Configuration of `bounds`.

    Attributes:
        output: Run directory; resumes if it exists.
        truth: Model whose distribution counts as the true one in the regret; None: no regret.
        alphas: Costs of deferral at which the regret is measured.
        num_prompts: Maximum number of prompts, after `skip_prompts`.
        num_samples: Texts of each model per prompt, for the expectations of the theorem.
    """

    output: HomePath
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

    def check(self, checks: InputChecks) -> None:
        """Check the inputs; raises UsageError."""
        RunDirectory(self.output).check_kind(self)
        checks.device(self.device)
        models = checks.pair(self.target, self.draft)
        if self.truth is not None:
            models.append(_check_truth(checks, self.truth, models[0]))
        self.check_prompts(checks, models, new_tokens=1, skip=self.skip_prompts)
        checks.output(self.output)


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


class PromptBounds(NamedTuple):
    """Acceptance of one prompt and its bounds.

    Attributes:
        length: L, the mean length of the target's texts.
        tvd: Epsilon, the mean TVD on the draft's texts.
    """

    acceptance: float
    tight: float
    proven: float
    printed: float
    length: float
    tvd: float


def bounds(config: BoundsConfig, progress: Progress = silent) -> list[Row]:
    """Measure acceptance, regret and their bounds; writes `rows.jsonl` to the output directory.

    -> a row of theorem 4.1, and one per deferral rule and alpha. Units are prompts.

    Raises:
        UsageError: a model or a prompt cannot be used.
    """
    checked(config)
    run = RunDirectory(config.output)
    with run.alone():
        pair = load_models(config, progress, full_vocabulary=True)
        truth = _load_truth(config, pair.target)
        prompts = config.read_prompts(pair, config.skip_prompts)
        names = {"target": config.target, "draft": config.draft, "truth": config.truth}
        marks = {name: fingerprint(path) for name, path in names.items() if path is not None}
        run.write_manifest(config, inputs=marks)
        found: list[_Found] = [_of_theorem(_acceptance(*pair, prompts, config, progress))]
        if truth is not None:
            found += _regret(truth, pair, prompts, config, progress)
        source = Source.here("paceline bounds", fingerprints=marks)
        common = config.sampling.setting | {"max_new_tokens": config.max_new_tokens}
        units = tuple(range(config.skip_prompts, config.skip_prompts + len(prompts)))
        rows = [
            Row(
                population=f"prompts of {config.prompts.path}",
                units=units,
                setting={**common, **setting},
                sums={name: rounded(values) for name, values in sums.items()},
                source=source,
            )
            for setting, sums in found
        ]
        write_rows(config.output / "rows.jsonl", rows)
    return rows


def _of_theorem(prompts: Sequence[PromptBounds]) -> _Found:
    columns = zip(*prompts, strict=True)
    return {"theorem": "4.1"}, dict(zip(PromptBounds._fields, map(list, columns), strict=True))


def _load_truth(config: BoundsConfig, target: HfModel) -> HfModel | None:
    if config.truth is None:
        return None
    return prepare_for_decoding(load_beside(target, config.truth, config.device))


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
        sample_texts(writer, repeated, config, config.sampling, texts, progress, skipped=skipped)
        scores = score_texts(PairTexts(target, draft, repeated, texts, config.sampling), progress)
        shape = (len(prompts), config.num_samples, -1)
        masks.append(scores.mask_BT.double().reshape(shape))
        tvds.append((1 - scores.acceptance_BT.double()).reshape(shape) * masks[-1])
    return [
        theorem_bounds(
            tvds[0][number],
            masks[0][number],
            tvds[1][number],
            masks[1][number],
            config.max_new_tokens,
        )
        for number in range(len(prompts))
    ]


def theorem_bounds(
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
        acceptance=float(1 - target_tvd_ST.sum() / target_mask_ST.sum()),
        tight=float(1 - ((1 + 2 * left_T) * by_position_T).sum() / length),
        proven=1 - 2 * step,
        printed=1 - step,
        length=length,
        tvd=epsilon,
    )


def _regret(
    truth: HfModel,
    pair: tuple[HfModel, HfModel],
    prompts: Sequence[Sequence[int]],
    config: BoundsConfig,
    progress: Progress,
) -> list[_Found]:
    """Settings and sums of each rule and alpha."""
    texts: list[list[int]] = []
    how = config, config.sampling, texts, progress
    sample_texts(truth, prompts, *how, skipped=config.skip_prompts)
    fitting = within_context((truth, *pair), prompts, texts, config.max_new_tokens)
    vocab_size = check_same_vocabulary(*pair)
    rules = [rule for alpha in config.alphas for rule in _rules(alpha)]
    found: list[_Found] = [
        (
            {"lemma": LEMMAS[type(rule)], "rule": rule.rule, "alpha": rule.alpha},
            {name: [] for name in (*Regret._fields, "violations", "positions")},
        )
        for rule in rules
    ]
    for number, (prompt, text) in enumerate(zip(prompts, fitting, strict=True), 1):
        probs = [
            _probs(model, prompt, text, config.sampling, vocab_size) for model in (truth, *pair)
        ]
        for rule, (_, sums) in zip(rules, found, strict=True):
            of_rule = regret_and_bound(rule, *probs)
            for name, values_T in of_rule._asdict().items():
                sums[name].append(float(values_T.sum()))
            sums["violations"].append(of_rule.num_violations)
            sums["positions"].append(len(text))
        progress("regret", number, len(prompts))
    return found


def _rules(alpha: float) -> list[Deferral]:
    """The plug-in rules; the alpha of Chow is a probability."""
    rules: list[Deferral] = [kind(alpha=alpha) for kind in (Opt, OptLog, Diff, DiffLog, ChowLog)]
    return [*rules, Chow(alpha=alpha)] if alpha <= 1 else rules


def _probs(
    model: Model,
    prompt: Sequence[int],
    text: Sequence[int],
    sampling: SamplingParams,
    vocab_size: int,
) -> Tensor:
    return to_probs(forced_logits(model, prompt, text, sampling, vocab_size), sampling).double()


class Regret(NamedTuple):
    """Regret of a rule at each position, its bound, and the risk of the best rule. [T] each."""

    regret: Tensor
    bound: Tensor
    least_risk: Tensor

    @property
    def num_violations(self) -> int:
        """Number of positions where the regret is above the bound or below 0, beyond rounding.

        Below 0 the rule that the lemma calls the best is not the best.
        """
        outside = (self.regret > self.bound * (1 + 1e-6) + 1e-6) | (self.regret < -1e-6)
        return int(outside.sum())


def regret_and_bound(
    rule: Deferral, truth_TV: Tensor, target_TV: Tensor, draft_TV: Tensor
) -> Regret:
    """Regret of a plug-in rule at each position, and its bound.

    Shapes: probabilities [T, V].
    Paper: Narasimhan et al. 2024, lemmas 1, 5, 6 and 7. Differs: lemmas 1 and 6 name the best rule
    and no bound; the bounds of their plug-in rules follow from the proofs of lemmas 5 and 7.
    """
    is_log = isinstance(rule, ChowLog | DiffLog | OptLog)
    draft_loss_T, bound_T = _loss_and_error(truth_TV, draft_TV, is_log=is_log)
    if isinstance(rule, Chow | ChowLog):
        cost_T = torch.full_like(draft_loss_T, rule.alpha)
    else:
        target_loss_T, error_T = _loss_and_error(truth_TV, target_TV, is_log=is_log)
        weight_T = 1.0
        if isinstance(rule, Opt | OptLog):
            weight_T = total_variation(target_TV, draft_TV)
        cost_T = target_loss_T + rule.alpha * weight_T
        bound_T = bound_T + error_T
    deferred_T = rule.defers(Position.of(target_TV, draft_TV)).squeeze(-1)
    risk_T = torch.where(deferred_T, cost_T, draft_loss_T)
    least_T = torch.where(draft_loss_T > cost_T, cost_T, draft_loss_T)
    return Regret(risk_T - least_T, bound_T, least_T)


def _loss_and_error(truth_TV: Tensor, model_TV: Tensor, *, is_log: bool) -> tuple[Tensor, Tensor]:
    """Expected loss of a model under the truth, and a bound of the error of its own estimate."""
    if not is_log:
        best_T1 = model_TV.argmax(-1, keepdim=True)
        return 1 - truth_TV.gather(-1, best_T1).squeeze(-1), (truth_TV - model_TV).abs().amax(-1)
    log_TV = model_TV.clamp(min=torch.finfo(torch.float32).tiny).log()
    error_T = log_TV.abs().amax(-1) * (truth_TV - model_TV).abs().sum(-1)
    return -(truth_TV * log_TV).sum(-1), error_T
