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
from paceline.core.sampling import UNTEMPERED, to_probs
from paceline.core.speed import block_efficiency_from_text, examined_places
from paceline.errors import UsageError
from paceline.measure.acceptance import forced_logits
from paceline.models.vocabulary import check_same_vocabulary
from paceline.progress import Progress, silent
from paceline.rng import named_generator

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.core.rules import Rule
    from paceline.core.sampling import SamplingParams
    from paceline.models.session import Model


class Position(NamedTuple):
    """Both models before each token of a text, and that token."""

    target_probs_TV: Tensor
    draft_probs_TV: Tensor
    target_raw_TV: Tensor
    draft_raw_TV: Tensor
    tokens_T: Tensor


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


def rule_effect(rule: Rule, at: Position) -> RuleEffect:
    """Exact at each position.

    Cost: a few passes over [T, V]; a binary rule needs one, since it induces p or q.
    Paper: Narasimhan et al. 2024, lemma 3 (a rule with an aim rejects with TVD(pi, q)).
    """
    p, q = at.target_probs_TV, at.draft_probs_TV
    if isinstance(rule, BinaryCascade):
        return _binary_effect(rule, at)
    raw = {"target_raw": at.target_raw_TV, "draft_raw": at.draft_raw_TV}
    kept = q * rule.accept_probs(p, q, **raw)
    induced = rule.induced_distribution(p, q, **raw)
    return RuleEffect(
        (1 - kept.sum(-1)).clamp(min=0),
        _share(_at(kept, at.tokens_T), _at(induced, at.tokens_T)),
        _tvd(p, induced),
        _kl(p, induced),
        _surprisal(induced, at),
    )


def _binary_effect(rule: BinaryCascade, at: Position) -> RuleEffect:
    p, q = at.target_probs_TV, at.draft_probs_TV
    deferred = rule.defers(p, q, at.target_raw_TV, at.draft_raw_TV)[..., 0]
    tvd = _tvd(p, q)
    kept, of_q = _at(torch.minimum(p, q), at.tokens_T), _at(q, at.tokens_T)
    of_p = _at(p, at.tokens_T)
    return RuleEffect(
        torch.where(deferred, tvd, 0),
        torch.where(deferred, _share(kept, of_p), _share(of_q, of_q)),
        torch.where(deferred, 0, tvd),
        torch.where(deferred, 0, _kl(p, q)),
        torch.where(deferred, _surprisal(p, at), _surprisal(q, at)),
    )


class RuleRow(NamedTuple):
    """One rule over all texts.

    `rejection_rate`, by gamma, with its interval over texts: at the places where blocks draft, which
    a text's first token is not, nor one that spends its budget; NaN where no place is left. `tvd`,
    `kl` and `surprisal` are means over all positions; `block_efficiency` by gamma.
    """

    rule: Rule
    rejection_rate: dict[int, Interval]
    tvd: float
    kl: float
    surprisal: float
    block_efficiency: dict[int, float]


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
) -> list[RuleRow]:
    """One row a rule, in order.

    `budget`: the tokens that a text may have at most, where the texts were cut there.

    Raises:
        UsageError: no text, no rule, or no text longer than the largest gamma.
    """
    vocab_size = check_same_vocabulary(target, draft)
    lengths = [len(completion) for completion in completions]
    if not rules or not lengths:
        raise UsageError(
            f"got {len(rules)} rules and {len(lengths)} texts; give at least one of each"
        )
    if max(lengths) <= max(gammas):
        raise UsageError(
            f"the longest text has {max(lengths)} tokens and gamma goes to {max(gammas)}, which wants "
            f"{max(gammas) + 1}; analyse longer texts, or smaller gammas"
        )
    shape = (len(rules), len(lengths), max(lengths))
    totals = RuleEffect(*(torch.zeros(shape) for _ in RuleEffect._fields))
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        at = _positions(target, draft, prompt, completion, sampling, vocab_size)
        for number, rule in enumerate(rules):
            effect = rule_effect(rule, at)
            for total, part_T in zip(totals, effect, strict=True):
                total[number, row, : len(completion)] = part_T.cpu()
        progress("analysing", row + 1, len(lengths))
    lengths_B = torch.tensor(lengths)
    mask_BT = torch.arange(max(lengths)) < lengths_B[:, None]
    rows: list[RuleRow] = []
    for number, rule in enumerate(rules):
        rejection_BT, survival_BT, *means_BT = (total[number] for total in totals)
        # a text's first token comes with the prompt
        drafted = 1 - rejection_BT[:, 1:], survival_BT[:, 1:], mask_BT[:, 1:]
        efficiency = {gamma: block_efficiency_from_text(*drafted, gamma) for gamma in gammas}
        rejection = {
            gamma: _rejection_rate(rejection_BT, survival_BT, lengths_B, gamma, seed, budget)
            for gamma in gammas
        }
        tvd, kl, surprisal = (float(part_BT.sum() / mask_BT.sum()) for part_BT in means_BT)
        rows.append(RuleRow(rule, rejection, tvd, kl, surprisal, efficiency))
    return rows


def _rejection_rate(
    rejection_BT: Tensor,
    survival_BT: Tensor,
    lengths_B: Tensor,
    gamma: int,
    seed: int,
    budget: int | None,
) -> Interval:
    """Rejected / examined over the places that blocks of this length draft at."""
    lasts_B = lengths_B if budget is None else lengths_B.clamp(max=budget - 1)
    width = rejection_BT.shape[1]
    drafted_BT = torch.arange(1, width) < lasts_B[:, None]
    examined_BT = examined_places(survival_BT[:, 1:], gamma) * drafted_BT
    examined_B = examined_BT.sum(-1)
    if not examined_B.any():
        return Interval(float("nan"), float("nan"), float("nan"))
    rejected_B = (examined_BT * rejection_BT[:, 1:].double()).sum(-1)
    return ratio_interval(rejected_B, examined_B, rng=named_generator(seed, "bootstrap"))


def _positions(
    target: Model,
    draft: Model,
    prompt: Sequence[int],
    completion: Sequence[int],
    sampling: SamplingParams,
    vocab_size: int,
) -> Position:
    logits = [
        forced_logits(model, prompt, completion, sampling, vocab_size) for model in (target, draft)
    ]
    p_TV, q_TV = (to_probs(logits_TV, sampling) for logits_TV in logits)
    if sampling.untempered:
        p_raw_TV, q_raw_TV = p_TV, q_TV
    else:
        p_raw_TV, q_raw_TV = (to_probs(logits_TV, UNTEMPERED) for logits_TV in logits)
    return Position(p_TV, q_TV, p_raw_TV, q_raw_TV, torch.tensor(list(completion)))


def _at(probs_TV: Tensor, tokens_T: Tensor) -> Tensor:
    return probs_TV.gather(-1, tokens_T[:, None].to(probs_TV.device)).squeeze(-1)


def _share(part: Tensor, whole: Tensor) -> Tensor:
    """part / whole; 0 for a token that cannot come."""
    return torch.where(whole > 0, part / torch.where(whole > 0, whole, 1), 0).clamp(max=1)


def _tvd(target_probs: Tensor, other: Tensor) -> Tensor:
    return 0.5 * (target_probs - other).abs().sum(-1)


def _kl(target_probs: Tensor, other: Tensor) -> Tensor:
    """KL(p || other), of probabilities."""
    logs = torch.xlogy(target_probs, target_probs) - torch.xlogy(target_probs, other)
    return logs.sum(-1).clamp(min=0)


def _surprisal(probs: Tensor, at: Position) -> Tensor:
    # what underflowed to 0 in the softmax is as unlikely as float32 can say, not impossible
    target_raw = at.target_raw_TV.clamp(min=torch.finfo(torch.float32).tiny)
    return -(probs * target_raw.log()).sum(-1)
