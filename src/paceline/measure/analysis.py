"""Computes the effect of acceptance rules from one teacher-forced pass of both models.

At each position, p and q determine the rejection rate of a rule, its induced distribution, and the
distance of that distribution to p. Nothing is decoded: the positions are those of a given text.
Text generated with a rule has other contexts, so the figures are approximate for rules that are not
lossless.
"""

# T positions, V vocabulary
from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from paceline.core.bootstrap import Interval, ratio_interval
from paceline.core.divergences import total_variation
from paceline.core.rule_base import Position, as_read
from paceline.core.rules import BinaryCascade
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
    if isinstance(rule, BinaryCascade):
        return _binary_effect(rule, at, tokens_T)
    given = at if sampling is None else as_read(rule, at, sampling)
    kept = at.draft * rule.accept_at(given)
    induced = rule.induced_at(given)
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
    """Effect of one rule over all texts.

    `rejection_rate`, `block_efficiency` and `drafted_per_block` are by gamma, over the positions
    that blocks draft: without the first token of a text where the target gives it
    (`Rule.num_undrafted`), and without the last token of the budget. Without such positions they
    are NaN, 1 and 0. The interval of `rejection_rate` is over texts. `tvd`, `kl` and `surprisal`
    are means over all positions, of the rule.
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
    """Analyze all rules on the same texts; one row per rule, in order.

    `budget`: maximum number of tokens of a text; None: the length of the longest text.
    `draft_sampling`: sampling parameters of the draft; None: those of the target.

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
            effect = rule_effect(rule, at, tokens_T, sampling)
            for total, part_T in zip(totals, effect, strict=True):
                total[number, row, : len(completion)] = part_T.cpu()
        progress("analyzing rules", row + 1, len(lengths))
    lengths_B = torch.tensor(lengths)
    mask_BT = torch.arange(max(lengths)) < lengths_B[:, None]
    budget_B = budgets_of(target, prompts, max(lengths) if budget is None else budget)
    budget_B = budget_B.clamp(min=lengths_B)  # a draft with a longer context may write longer texts
    rows: list[RuleRow] = []
    for number, rule in enumerate(rules):
        rejection_BT, survival_BT, *means_BT = (total[number] for total in totals)
        tvd, kl, surprisal = (float(part_BT.sum() / mask_BT.sum()) for part_BT in means_BT)
        parts = rule, rejection_BT, survival_BT, mask_BT, budget_B
        figures = {gamma: _block_figures(*parts, gamma, seed) for gamma in gammas}
        rates = {gamma: rate for gamma, (rate, _, _) in figures.items()}
        taus = {gamma: tau for gamma, (_, tau, _) in figures.items()}
        drafted = {gamma: per_block for gamma, (_, _, per_block) in figures.items()}
        rows.append(RuleRow(rule, rates, tvd, kl, surprisal, taus, drafted))
    return rows


def _block_figures(
    rule: Rule,
    rejection_BT: Tensor,
    survival_BT: Tensor,
    mask_BT: Tensor,
    budget_B: Tensor,
    gamma: int,
    seed: int,
) -> tuple[Interval, float, float]:
    """Rejected / examined drafted tokens, block efficiency, and drafted tokens per block."""
    first, undefined = rule.num_undrafted, Interval(math.nan, math.nan, math.nan)
    rejection_BT, survival_BT = rejection_BT[:, first:], survival_BT[:, first:]
    mask_BT, budget_B = mask_BT[:, first:], budget_B - first
    if not mask_BT.any():
        return undefined, 1.0, 0.0
    blocks = survival_BT, mask_BT, gamma
    tau = block_efficiency_from_text(1 - rejection_BT, *blocks, budget=budget_B)
    per_block = drafted_per_block(*blocks, budget=budget_B)
    examined_BT = judged_places(*blocks, budget=budget_B)
    examined_B = examined_BT.sum(-1)
    if not examined_B.any():
        return undefined, tau, per_block
    rejected_B = (examined_BT * rejection_BT.double()).sum(-1)
    rng = named_generator(seed, "bootstrap")
    return ratio_interval(rejected_B, examined_B, rng=rng, most=1.0), tau, per_block


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
    """part / whole; 0 where whole is 0."""
    return torch.where(whole > 0, part / torch.where(whole > 0, whole, 1), 0).clamp(max=1)


def _kl(target_probs: Tensor, other: Tensor) -> Tensor:
    logs = torch.xlogy(target_probs, target_probs) - torch.xlogy(target_probs, other)
    return logs.sum(-1).clamp(min=0)


def _surprisal(probs: Tensor, at: Position) -> Tensor:
    # probabilities that underflowed to 0 must not give infinity
    target_raw = at.target_raw.clamp(min=torch.finfo(torch.float32).tiny)
    return -(probs * target_raw.log()).sum(-1)
