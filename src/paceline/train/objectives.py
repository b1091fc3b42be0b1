"""What the draft is trained to make small: one divergence, or a weighted sum.

Each choice is a tagged model; the mathematics is in `core.divergences`, `core.tvd_plus_plus` and
`core.rule_losses`.
"""

# C tokens of a chunk, K drawn tokens of each, V vocabulary
from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import torch
from pydantic import Field, field_validator, model_validator

from paceline.config import StrictModel
from paceline.core import divergences
from paceline.core.rule_losses import RuleLoss, rule_loss
from paceline.core.rules import AnyRule, Lenient, Lossy
from paceline.core.tvd_plus_plus import Estimator, RewardMoments, tvd_plus_plus
from paceline.native.divergences import DivergenceKind, Term

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


class Weighted(StrictModel):
    """A term of the objective."""

    weight: float = Field(default=1.0, gt=0, allow_inf_nan=False)


class ForwardKL(Weighted):
    """KL(target || draft)."""

    kind: Literal["forward_kl"] = "forward_kl"


class ReverseKL(Weighted):
    """KL(draft || target)."""

    kind: Literal["reverse_kl"] = "reverse_kl"


class JSD(Weighted):
    """beta KL(target || mixture) + (1 - beta) KL(draft || mixture)."""

    kind: Literal["jsd"] = "jsd"
    beta: float = 0.5

    @field_validator("beta")
    @classmethod
    def _inside(cls, beta: float) -> float:
        divergences.check_beta(beta)
        return beta


class TVD(Weighted):
    """1 - acceptance, sum_v min(p, q); of a draft that proposes some tokens, over those."""

    kind: Literal["tvd"] = "tvd"


class NegativeLogAcceptance(Weighted):
    """-log acceptance, counted as in TVD."""

    kind: Literal["negative_log_acceptance"] = "negative_log_acceptance"


class TVDPlusPlus(Weighted):
    """The slope of TVD with normalised rewards, estimated one way or another.

    The rewards' moments are those of one part of a step, over all processes: the result hangs on
    gradient_accumulation_steps, unlike any other objective's.

    Attributes:
        estimator: Which tokens the rewards are of, see `core.tvd_plus_plus`.
        num_samples: Tokens drawn at each position, where they are drawn.
    """

    kind: Literal["tvd_plus_plus"] = "tvd_plus_plus"
    estimator: Estimator = "exact"
    num_samples: int = Field(default=1, ge=1)


class UnderRule(Weighted):
    """What the rule that will be served makes of the draft.

    Attributes:
        rule: By its tag and parameters, such as `{rule: opt, alpha: 0.2}`.
        loss: What it rejects, the same in the logarithm, or KL(pi || draft).
    """

    kind: Literal["rule"] = "rule"
    rule: Annotated[AnyRule, Field(discriminator="rule")]
    loss: RuleLoss = "rejection"

    @model_validator(mode="after")
    def _has_an_aim(self) -> UnderRule:
        untuned = isinstance(self.rule, Lossy) and self.rule.beta != "tuned"
        if self.loss == "forward_kl" and (untuned or isinstance(self.rule, Lenient)):
            raise ValueError(
                f"{self.rule.rule} states no distribution to aim at; use rejection or "
                "negative_log_acceptance as loss"
            )
        return self


class CrossEntropy(Weighted):
    """-log draft(label): the labels alone, as when only the target's text can be had."""

    kind: Literal["cross_entropy"] = "cross_entropy"


Objective = Annotated[
    ForwardKL
    | ReverseKL
    | JSD
    | TVD
    | NegativeLogAcceptance
    | TVDPlusPlus
    | UnderRule
    | CrossEntropy,
    Field(discriminator="kind"),
]


def as_terms(value: Any) -> Any:
    """Accept `tvd`, `{kind: tvd}`, `{rule: {...}}` and `[{kind: tvd}, forward_kl]` alike."""
    terms = value if isinstance(value, list | tuple) else [value]
    return [_as_term(term) for term in terms]


def _as_term(term: Any) -> Any:
    if isinstance(term, str):
        return {"kind": term}
    if isinstance(term, dict) and "rule" in term:
        return {"kind": "rule"} | term
    return term


class Policy(NamedTuple):
    """What TVD++ knows of a batch: the moments of its rewards, and the tokens drawn here."""

    moments: RewardMoments
    drawn_CK: Tensor | None


def reads_target(terms: Sequence[Objective]) -> bool:
    """Whether the target's probabilities are needed, or labels do."""
    return any(not isinstance(term, CrossEntropy) for term in terms)


def counts_acceptance(terms: Sequence[Objective]) -> bool:
    """Whether a term is of what is accepted, so that it needs the target's whole distribution."""
    return any(isinstance(term, TVD | NegativeLogAcceptance | TVDPlusPlus) for term in terms)


def token_losses(
    terms: Sequence[Objective],
    target_log_probs_CV: Tensor | None,
    draft_log_probs_CV: Tensor,
    labels_C: Tensor,
    policies: Sequence[Policy | None] = (),
    *,
    log_coverage_C: Tensor | None = None,
) -> Tensor:
    """The weighted sum of all terms for each token, in nats (TVD: a plain number). -> [C].

    Args:
        terms: The objective.
        target_log_probs_CV: Normalised over the V tokens that the draft proposes.
        draft_log_probs_CV: The same.
        labels_C: Places of the labels among them.
        policies: A term's own, for TVD++.
        log_coverage_C: Log of the target's mass on these tokens; None: it is 1.
    """
    given = target_log_probs_CV, draft_log_probs_CV, labels_C, log_coverage_C
    losses = [
        term.weight * _token_loss(term, *given, policies[index] if policies else None)
        for index, term in enumerate(terms)
    ]
    return sum(losses[1:], start=losses[0])


def _token_loss(
    term: Objective,
    target_log_probs: Tensor | None,
    draft_log_probs: Tensor,
    labels_C: Tensor,
    log_coverage_C: Tensor | None,
    policy: Policy | None,
) -> Tensor:
    if isinstance(term, CrossEntropy):
        return -draft_log_probs.gather(-1, labels_C[:, None]).squeeze(-1)
    assert target_log_probs is not None, "only cross entropy does without the target"
    if log_coverage_C is not None and counts_acceptance([term]):
        target_log_probs = target_log_probs + log_coverage_C[:, None]
        missed_C = -torch.expm1(log_coverage_C)  # the target's mass on all other tokens
        loss_C = _divergence(term, target_log_probs, draft_log_probs, policy)
        # of the others |p - q| is p; a logarithm of what is accepted has no part of theirs
        return loss_C if isinstance(term, NegativeLogAcceptance) else loss_C + 0.5 * missed_C
    return _divergence(term, target_log_probs, draft_log_probs, policy)


def _divergence(
    term: Objective, target_log_probs: Tensor, draft_log_probs: Tensor, policy: Policy | None
) -> Tensor:
    match term:
        case ForwardKL():
            return divergences.forward_kl(target_log_probs, draft_log_probs)
        case ReverseKL():
            return divergences.reverse_kl(target_log_probs, draft_log_probs)
        case JSD(beta=beta):
            return divergences.jsd(target_log_probs, draft_log_probs, beta=beta)
        case TVD():
            return divergences.tvd(target_log_probs, draft_log_probs)
        case NegativeLogAcceptance():
            return divergences.negative_log_acceptance(target_log_probs, draft_log_probs)
        case TVDPlusPlus(estimator=estimator):
            assert policy is not None, "TVD++ looks at the whole batch first"
            return tvd_plus_plus(target_log_probs, draft_log_probs, estimator, *policy)
        case UnderRule(rule=rule, loss=loss):
            return rule_loss(rule, target_log_probs, draft_log_probs, loss)
        case CrossEntropy():
            raise AssertionError("no divergence")


def has_native_terms(terms: Sequence[Objective]) -> bool:
    """Does the C library know all of these?"""
    return not any(isinstance(term, TVDPlusPlus | UnderRule) for term in terms)


def native_terms(terms: Sequence[Objective]) -> list[Term]:
    """The same objective, for the C library."""
    return [
        Term(
            DivergenceKind[term.kind.upper()],
            term.weight,
            term.beta if isinstance(term, JSD) else 0.0,
        )
        for term in terms
    ]
