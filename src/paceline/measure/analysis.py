"""Every rule at every threshold from one teacher-forced pass of both models: nothing is decoded.

What a rule does at a position follows from p and q there: how often it rejects, what it induces, how
far that is from p. The positions are those of a given text; text that a rule makes itself visits other
ones, the more so the further the rule is from whoever wrote this text.
"""

# T positions, V vocabulary
from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from paceline.core.bootstrap import Interval, ratio_interval
from paceline.core.cascade_rules import BinaryCascade
from paceline.core.divergences import total_variation
from paceline.core.rule_base import Position
from paceline.core.sampling import UNTEMPERED, proposal_params, to_probs
from paceline.core.speed import block_efficiency_from_text, drafted_per_block, judged_places
from paceline.errors import UsageError
from paceline.measure.acceptance import budgets_of, forced_logits
from paceline.models.compatibility import check_same_vocabulary
from paceline.progress import Progress, silent
from paceline.rng import named_generator

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.core.rule_base import Rule
    from paceline.core.sampling import SamplingParams
    from paceline.models.contract import Model


class RuleEffect(NamedTuple):
    """What a rule does at each position, [T].

    `rejection`: 1 - sum q a. `survival`: chance that the text's token was drafted and kept, given that
    it came. `tvd`, `kl`: TVD and KL(p || induced), in nats, of what the rule induces to the target's.
    `surprisal`: mean -log p of what the rule induces, untempered p, in nats: how unlikely the target
    finds the rule's tokens. A rule that sharpens is far from p in TVD and yet surprises it little.
    """

    rejection_T: Tensor
    survival_T: Tensor
    tvd_T: Tensor
    kl_T: Tensor
    surprisal_T: Tensor


def rule_effect(rule: Rule, at: Position, tokens_T: Tensor) -> RuleEffect:
    """Exact at each position, [T, V], of a text whose tokens these are.

    Cost: a few passes over [T, V]; a binary rule needs one, since it induces p or q.
    Paper: Narasimhan et al. 2024, lemma 3 (a rule with an aim rejects with TVD(pi, q)).
    """
    if isinstance(rule, BinaryCascade):
        return _binary_effect(rule, at, tokens_T)
    kept = at.draft * rule.accept(at)
    induced = rule.induced(at)
    return RuleEffect(
        (1 - kept.sum(-1)).clamp(min=0),
        _share(_at(kept, tokens_T), _at(induced, tokens_T)),
        total_variation(at.target, induced),
        _kl(at.target, induced),
        _surprisal(induced, at),
    )


def _binary_effect(rule: BinaryCascade, at: Position, tokens_T: Tensor) -> RuleEffect:
    p, q = at.target, at.draft
    deferred = rule.defers(at)[..., 0]
    tvd = total_variation(p, q)
    kept, of_q = _at(torch.minimum(p, q), tokens_T), _at(q, tokens_T)
    of_p = _at(p, tokens_T)
    return RuleEffect(
        torch.where(deferred, tvd, 0),
        torch.where(deferred, _share(kept, of_p), _share(of_q, of_q)),
        torch.where(deferred, 0, tvd),
        torch.where(deferred, 0, _kl(p, q)),
        torch.where(deferred, _surprisal(p, at), _surprisal(q, at)),
    )


class RuleRow(NamedTuple):
    """One rule over all texts.

    `rejection_rate`, by gamma, with its interval over texts: at the places where blocks draft. These
    leave out the first token of a text under an exact rule (`Rule.num_undrafted`), and a token that
    spends the budget; NaN where no place is left. `block_efficiency` and `drafted_per_block`, the
    mean length of a block's draft, by gamma: of the same blocks; 1 and 0 where there is none. `tvd`,
    `kl` and `surprisal` are of the whole text: the same positions for every rule.
    """

    rule: Rule
    rejection_rate: dict[int, Interval]
    tvd: float
    kl: float
    surprisal: float
    block_efficiency: dict[int, float]
    drafted_per_block: dict[int, float]


@torch.inference_mode()
def analyze_rules(
    target: Model,
    draft: Model,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    rules: Sequence[Rule],
    sampling: SamplingParams,
    gammas: Sequence[int] = (1, 2, 3, 4, 5),
    seed: int = 0,
    progress: Progress = silent,
    budget: int | None = None,
    draft_sampling: SamplingParams | None = None,
) -> list[RuleRow]:
    """One row a rule, in order.

    `budget`: the tokens that a text might have at most; shorter ones, unless the context was full,
    ended with an end-of-text token. None: the longest text was cut.
    `draft_sampling`: how the draft draws; None: as the target.

    Raises:
        UsageError: no text or no rule.
    """
    vocab_size = check_same_vocabulary(target, draft)
    samplings = sampling, proposal_params(sampling, draft_sampling)
    lengths = [len(completion) for completion in completions]
    if not rules or not lengths:
        raise UsageError(
            f"got {len(rules)} rules and {len(lengths)} texts; give at least one of each"
        )
    shape = (len(rules), len(lengths), max(lengths))
    totals = RuleEffect(*(torch.zeros(shape) for _ in RuleEffect._fields))
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        at = _positions(target, draft, prompt, completion, samplings, vocab_size)
        tokens_T = torch.tensor(list(completion))
        for number, rule in enumerate(rules):
            effect = rule_effect(rule, at, tokens_T)
            for total, part_T in zip(totals, effect, strict=True):
                total[number, row, : len(completion)] = part_T.cpu()
        progress("analysing", row + 1, len(lengths))
    lengths_B = torch.tensor(lengths)
    mask_BT = torch.arange(max(lengths)) < lengths_B[:, None]
    budget_B = budgets_of(target, prompts, max(lengths) if budget is None else budget)
    budget_B = budget_B.clamp(min=lengths_B)  # the writer's context may be longer than the target's
    rows: list[RuleRow] = []
    for number, rule in enumerate(rules):
        rejection_BT, survival_BT, *means_BT = (total[number] for total in totals)
        drafted = _Drafted(rule, rejection_BT, survival_BT, mask_BT, budget_B)
        tvd, kl, surprisal = (float(part_BT.sum() / mask_BT.sum()) for part_BT in means_BT)
        rows.append(
            RuleRow(
                rule,
                {gamma: drafted.rejection_rate(gamma, seed) for gamma in gammas},
                tvd,
                kl,
                surprisal,
                {gamma: drafted.block_efficiency(gamma) for gamma in gammas},
                {gamma: drafted.per_block(gamma) for gamma in gammas},
            )
        )
    return rows


class _Drafted:
    """The positions of the texts where blocks draft under a rule."""

    def __init__(
        self,
        rule: Rule,
        rejection_BT: Tensor,
        survival_BT: Tensor,
        mask_BT: Tensor,
        budget_B: Tensor,
    ) -> None:
        first = rule.num_undrafted
        self._rejection_BT, self._survival_BT = rejection_BT[:, first:], survival_BT[:, first:]
        self._mask_BT, self._budget_B = mask_BT[:, first:], budget_B - first
        self._any = bool(self._mask_BT.any())

    def block_efficiency(self, gamma: int) -> float:
        if not self._any:
            return 1.0
        return block_efficiency_from_text(
            1 - self._rejection_BT, self._survival_BT, self._mask_BT, gamma, budget=self._budget_B
        )

    def per_block(self, gamma: int) -> float:
        if not self._any:
            return 0.0
        return drafted_per_block(self._survival_BT, self._mask_BT, gamma, budget=self._budget_B)

    def rejection_rate(self, gamma: int, seed: int) -> Interval:
        """Rejected / judged drafted tokens."""
        nothing = Interval(float("nan"), float("nan"), float("nan"))
        if not self._any:
            return nothing
        judged_BT = judged_places(self._survival_BT, self._mask_BT, gamma, budget=self._budget_B)
        judged_B = judged_BT.sum(-1)
        if not judged_B.any():
            return nothing
        rejected_B = (judged_BT * self._rejection_BT.double()).sum(-1)
        rng = named_generator(seed, "bootstrap")
        return ratio_interval(rejected_B, judged_B, rng=rng, most=1.0)


def _positions(
    target: Model,
    draft: Model,
    prompt: Sequence[int],
    completion: Sequence[int],
    samplings: tuple[SamplingParams, SamplingParams],
    vocab_size: int,
) -> Position:
    probs: list[Tensor] = []
    raws: list[Tensor] = []
    for model, sampling in zip((target, draft), samplings, strict=True):
        logits_TV = forced_logits(model, prompt, completion, sampling, vocab_size)
        probs.append(to_probs(logits_TV, sampling))
        raws.append(probs[-1] if sampling.untempered else to_probs(logits_TV, UNTEMPERED))
    return Position(*probs, *raws)


def _at(probs_TV: Tensor, tokens_T: Tensor) -> Tensor:
    return probs_TV.gather(-1, tokens_T[:, None].to(probs_TV.device)).squeeze(-1)


def _share(part: Tensor, whole: Tensor) -> Tensor:
    """part / whole; 0 for a token that cannot come."""
    return torch.where(whole > 0, part / torch.where(whole > 0, whole, 1), 0).clamp(max=1)


def _kl(target_probs: Tensor, other: Tensor) -> Tensor:
    """KL(p || other), of probabilities."""
    logs = torch.xlogy(target_probs, target_probs) - torch.xlogy(target_probs, other)
    return logs.sum(-1).clamp(min=0)


def _surprisal(probs: Tensor, at: Position) -> Tensor:
    # what underflowed to 0 in the softmax is as unlikely as float32 can say, not impossible
    target_raw = at.target_raw.clamp(min=torch.finfo(torch.float32).tiny)
    return -(probs * target_raw.log()).sum(-1)
