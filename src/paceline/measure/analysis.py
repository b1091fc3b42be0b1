"""Predicts quality and speedup of acceptance rules from one teacher-forced pass of both models.

At each position, p and q determine the rejection rate of a rule, its induced distribution, and the
distance of that distribution to p. Nothing is decoded: the positions are those of a given text.
Text generated with a rule has other contexts, so the figures are approximate for rules that are not
lossless.
"""

# T positions, V vocabulary
from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from paceline.config import Options, Result, fields_of
from paceline.core.divergences import total_variation
from paceline.core.rule_base import Bonus, Position, as_read, with_bonus
from paceline.core.rules import DEFAULT_RULES
from paceline.core.sampling import UNTEMPERED, to_probs
from paceline.core.speed import drafted_tokens, examined_places, tokens_and_blocks
from paceline.data.input_checks import InputChecks, checked
from paceline.environment import environment
from paceline.extensions import RuleChoice
from paceline.measure.acceptance import PairTexts, forced_logits, usable_gammas
from paceline.measure.latency import PassTimer
from paceline.measure.pair import PairConfig, load_models, sample_texts
from paceline.measure.results import disturbance
from paceline.measure.slices import Slice, slices_of
from paceline.models.loading import fingerprint
from paceline.progress import Progress, silent
from paceline.results.figures import FIGURES
from paceline.results.row import Row, Source, grouped

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline.core.rule_base import Rule
    from paceline.core.sampling import SamplingParams
    from paceline.models.contract import Model
    from paceline.results.row import Label

_MEANS = ("output_tvd", "output_kl", "surprisal")  # sums over all positions of a text
_OF_BLOCKS: tuple[str, ...] = ("emitted", "calls", "expected_examined", "expected_rejected")


class RuleEffect(NamedTuple):
    """Effect of a rule at each position, [T].

    Attributes:
        rejection_T: 1 - sum_v q a, a the acceptance probability.
        survival_T: Probability that the text's token was an accepted draft token, given the token.
        tvd_T: Total variation distance of the induced distribution to p.
        kl_T: KL(p || induced), nats.
        surprisal_T: Mean of -log p over the induced distribution, untempered p, nats. A rule that
            sharpens p has a high TVD but a low surprisal.
    """

    rejection_T: Tensor
    survival_T: Tensor
    tvd_T: Tensor
    kl_T: Tensor
    surprisal_T: Tensor


def rule_effect(
    rule: Rule, at: Position, tokens_T: Tensor, sampling: SamplingParams | None = None
) -> RuleEffect:
    """Exact effect of a rule at each position of a text. Shapes: `at` [T, V], tokens [T].

    `sampling`: the target's parameters; None: the rule gets all distributions of `at`.

    Paper: Narasimhan et al. 2024, lemma 3 (a rule with target pi rejects with TVD(pi, q)).
    """
    read = at if sampling is None else as_read(rule, at, sampling)
    kept = at.draft * rule.accept_at(read)
    induced = rule.induced_at(read)
    return RuleEffect(
        (1 - kept.sum(-1)).clamp(min=0),
        _share(_at(kept, tokens_T), _at(induced, tokens_T)),
        total_variation(at.target, induced),
        _kl(at.target, induced),
        _surprisal(induced, at),
    )


@torch.inference_mode()
def analyze_rules(
    texts: PairTexts,
    rules: Sequence[Rule],
    gammas: Sequence[int] = (1, 2, 3, 4, 5),
    progress: Progress = silent,
) -> list[list[Row]]:
    """Analyze all rules on the same texts.

    Blocks draft all positions but the last of the budget and, where the target gives it
    (`Rule.num_undrafted`), the first of a text. Without such positions the sums of blocks are 0.

    Returns:
        For each rule its effect on the texts, then a row per gamma, also with its blocks. The only
        setting is `gamma`.
    """
    lengths = texts.lengths
    shape = (len(rules), len(lengths), max(lengths))
    totals = RuleEffect(*(torch.zeros(shape) for _ in RuleEffect._fields))
    for number, (prompt, completion) in enumerate(
        zip(texts.prompts, texts.completions, strict=True)
    ):
        at = _positions(texts, prompt, completion)
        tokens_T = torch.tensor(list(completion))
        for place, rule in enumerate(rules):
            effect = rule_effect(rule, at, tokens_T, texts.sampling)
            for total, part_T in zip(totals, effect, strict=True):
                total[place, number, : len(completion)] = part_T.cpu()
        progress("analyzing rules", number + 1, len(lengths))
    lengths_B = torch.tensor(lengths)
    mask_BT = torch.arange(max(lengths)) < lengths_B[:, None]
    budget_B = texts.budgets
    base = Row(
        population="texts",
        units=tuple(range(len(lengths))),
        setting={},
        sums={"tokens": tuple(map(float, lengths))},
        source=Source(command="analyze"),
    )
    found: list[list[Row]] = []
    for place, rule in enumerate(rules):
        first = rule.num_undrafted
        rejection_BT, survival_BT, *means_BT = (total[place] for total in totals)
        means = zip(_MEANS, (part_BT.double().sum(-1) for part_BT in means_BT), strict=True)
        own = base.extended({name: part_B for name, part_B in means if part_B.isfinite().all()})
        parts = rejection_BT[:, first:], survival_BT[:, first:], mask_BT[:, first:]
        found.append([own, *(_blocks(own, *parts, budget_B - first, gamma) for gamma in gammas)])
    return found


def _blocks(
    row: Row,
    rejection_BT: Tensor,
    survival_BT: Tensor,
    mask_BT: Tensor,
    budget_B: Tensor,
    gamma: int,
) -> Row:
    """The row with the blocks of gamma tokens."""
    drafted, sums = 0.0, dict.fromkeys(_OF_BLOCKS, torch.zeros(len(mask_BT)))
    if mask_BT.any():
        blocks = survival_BT, mask_BT, gamma
        emitted_B, calls_B = tokens_and_blocks(1 - rejection_BT, *blocks, budget=budget_B)
        examined_BT = examined_places(*blocks, budget=budget_B)
        rejected_B = (examined_BT * rejection_BT.double()).sum(-1)
        values = emitted_B, calls_B, examined_BT.sum(-1), rejected_B
        sums = dict(zip(_OF_BLOCKS, values, strict=True))
        drafted = float(drafted_tokens(*blocks, budget=budget_B).sum() / calls_B.sum())
    return row.extended(sums, {"drafted_per_block": drafted}, gamma=gamma)


def _positions(texts: PairTexts, prompt: Sequence[int], completion: Sequence[int]) -> Position:
    probs: list[Tensor] = []
    raws: list[Tensor] = []
    for model, sampling in zip(texts.pair, texts.samplings, strict=True):
        logits_TV = forced_logits(model, prompt, completion, sampling, texts.vocab_size)
        probs.append(to_probs(logits_TV, sampling))
        raws.append(probs[-1] if sampling.untempered else to_probs(logits_TV, UNTEMPERED))
    return Position(*probs, *raws)


def _at(probs_TV: Tensor, tokens_T: Tensor) -> Tensor:
    return probs_TV.gather(-1, tokens_T[:, None].to(probs_TV.device)).squeeze(-1)


def _share(part: Tensor, whole: Tensor) -> Tensor:
    """part / whole; 0 where whole is 0."""
    return torch.where(whole > 0, part / torch.where(whole > 0, whole, 1), 0).clamp(max=1)


def _kl(target_probs: Tensor, other: Tensor) -> Tensor:
    logs = torch.xlogy(target_probs, target_probs) - torch.xlogy(target_probs, other)
    return logs.sum(-1).clamp(min=0)


def _surprisal(probs: Tensor, at: Position) -> Tensor:
    # probabilities that underflowed to 0 must not give infinity
    target_raw = at.target_raw.clamp(min=torch.finfo(torch.float32).tiny)
    return -(probs * target_raw.log()).sum(-1)


class AnalyzeConfig(PairConfig):
    """Configuration of `analyze`."""

    num_prompts: int = Field(default=16, ge=1)
    rules: tuple[RuleChoice, ...] = Field(default=DEFAULT_RULES, min_length=1)
    bonus: Bonus = "rule"
    """What bonus tokens and first tokens follow: the rule, or the target, as in vLLM."""
    gammas: tuple[Annotated[int, Field(ge=1)], ...] = Field(default=(1, 2, 3, 4, 5), min_length=1)
    pass_repeats: int = Field(default=15, ge=1)
    slices: Annotated[tuple[str, ...], Options()] = ()

    def check(self, checks: InputChecks) -> None:
        checks.device(self.device)
        models = checks.pair(self.target, self.draft)
        self.note_defaults(checks)
        count = self.check_prompts(checks, models, new_tokens=1)
        slices_of(self.slices, self.prompts, [()] * count)


class PredictedFrontier(Result):
    """What each rule of the configuration would do, in `rows`, on the same texts.

    The units are the numbers of the prompts. A rule has a row without gamma, with the distance of
    its output to the target's distribution, and a row per gamma, also with its blocks and their
    costs.
    """

    schema_version: Literal[1] = 1
    kind: Literal["analyze"] = "analyze"
    config: AnalyzeConfig
    rows: list[Row]
    slices: list[Slice] = Field(default_factory=list[Slice])
    environment: dict[str, object]

    @property
    def summary(self) -> str:
        """What was compared."""
        return f"{len(self.fastest())} settings of rules on {self.rows[0].population}"

    @property
    def disturbance(self) -> str:
        """Why the block costs cannot be those of an idle machine; empty: they can."""
        return disturbance(self.rows)

    def fastest(self, of: Slice | None = None) -> list[Row]:
        """A row per rule: that of the gamma with the highest expected speedup, in a slice."""
        rows = [row for row in self.rows if "gamma" in row.setting]
        rows = rows if of is None else [row.only(of.units) for row in rows]
        rules = grouped(rows, lambda row: row.setting["label"]).values()
        return [max(rule, key=FIGURES["expected_speedup"].value) for rule in rules]


def analyze(config: AnalyzeConfig, progress: Progress = silent) -> PredictedFrontier:
    """Load both models, sample text, and analyze every rule on it.

    A parallel draft is analyzed as it drafts token by token.

    Raises:
        UsageError: a model, a prompt file or the pair of tokenizers cannot be used.
    """
    checked(config)
    pair = load_models(config.model_copy(update={"parallel": False}), progress)
    marks = {name: fingerprint(getattr(config, name)) for name in ("target", "draft")}
    config, prompts = pair.prompts(config)
    return analyze_models(*pair, prompts, config, progress, marks)


def analyze_models(
    target: Model,
    draft: Model,
    prompts: Sequence[Sequence[int]],
    config: AnalyzeConfig,
    progress: Progress = silent,
    fingerprints: Mapping[str, str] = MappingProxyType({}),
) -> PredictedFrontier:
    """Analyze two loaded models, with these fingerprints, on tokenized prompts."""
    prompts = prompts[: config.num_prompts]
    written = sample_texts(target, prompts, config, config.sampling, progress)
    texts = PairTexts(target, draft, prompts, written, *config.scoring)
    gammas = usable_gammas(config.gammas, max(texts.lengths), config.max_new_tokens)
    costs = PassTimer.within(texts, gammas).run(config.pass_repeats, progress)
    rules = [with_bonus(rule, config.bonus) for rule in config.rules]
    analyzed = analyze_rules(texts, rules, gammas, progress)
    sizes = {"target": target.num_parameters, "draft": draft.num_parameters}
    source = Source.here("analyze", fingerprints=dict(fingerprints), sizes=sizes)
    named = {"population": f"prompts of {config.prompts.path}", "source": source}
    rows: list[Row] = []
    for rule, (own, *blocks) in zip(config.rules, analyzed, strict=True):
        setting = _setting(config, rule)
        rows.append(own.extended(**setting))
        rows += [costs.priced(row).extended(**setting) for row in blocks]
    rows = [row.model_copy(update=named) for row in rows]
    slices = slices_of(config.slices, config.prompts, prompts)
    return PredictedFrontier(config=config, rows=rows, slices=slices, environment=environment())


def _setting(config: AnalyzeConfig, rule: RuleChoice) -> dict[str, Label]:
    parameters = {name: getattr(rule, name) for name in fields_of(type(rule))}
    values = [value for name, value in parameters.items() if name != "rule"]
    shown = (f"{value:g}" if isinstance(value, float) else str(value) for value in values)
    setting = config.setting | {"bonus": config.bonus}
    setting |= {"rule": rule.name, "label": " ".join([rule.name, *shown])}
    return setting | {
        name: value if isinstance(value, str | int | float) else str(value)
        for name, value in parameters.items()
    }
