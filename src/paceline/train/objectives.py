"""What the draft is trained to make small: one divergence, or a weighted sum.

Each choice is a tagged model; the mathematics is in `core.divergences`, `core.tvd_plus_plus` and
`core.rule_losses`.
"""

# C tokens of a chunk, K drawn tokens of each, V vocabulary
from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, TypeAlias

import torch
from pydantic import Field, field_validator, model_validator

from paceline.config import StrictModel
from paceline.core import divergences
from paceline.core.rule_base import Position
from paceline.core.rule_losses import RuleLoss, rule_loss
from paceline.core.rules import RuleChoice
from paceline.core.tvd_plus_plus import Estimator, RewardMoments, tvd_plus_plus
from paceline.extensions import IMPORT, variants
from paceline.native.structures import DivergenceKind, Term

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


class Policy(NamedTuple):
    """What TVD++ knows of a batch: the moments of its rewards, and the tokens drawn here."""

    moments: RewardMoments
    drawn_CK: Tensor | None


class Compared(NamedTuple):
    """What a term's loss is computed from, at the tokens of a chunk.

    Attributes:
        target_log_probs_CV: Normalised over the V tokens that the draft proposes; None where the
            objective reads labels alone.
        draft_log_probs_CV: The same.
        labels_C: Places of the labels among them.
        policy: The term's own, for TVD++.
        log_coverage_C: Log of the target's mass on these tokens; None: it is 1.
    """

    target_log_probs_CV: Tensor | None
    draft_log_probs_CV: Tensor
    labels_C: Tensor
    policy: Policy | None = None
    log_coverage_C: Tensor | None = None


class ObjectiveTerm(StrictModel, ABC):
    """A term of the objective.

    Attributes:
        weight: Factor of the term's loss.
        reads_target: Whether it needs the target's probabilities; if not, the labels do.
        counts_acceptance: Whether it is a figure of what is accepted, and so needs the target's
            mass on the tokens that the draft does not propose.
        missed_weight: What each unit of that mass adds to the loss.
        needs_all_tokens: Why it cannot be taken over a part of the vocabulary; None: it can.
    """

    weight: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    reads_target: ClassVar[bool] = True
    counts_acceptance: ClassVar[bool] = False
    missed_weight: ClassVar[float] = 0.0

    @property
    def needs_all_tokens(self) -> str | None:
        return None

    def native_term(self) -> Term | None:
        """This term in C; None: PyTorch computes it.

        What a class declares does not hold for classes derived from it.
        """
        return None

    @abstractmethod
    def per_token(self, at: Compared) -> Tensor:
        """The term without its weight, one value a token, [C]."""

    def _seen_target(self, at: Compared) -> Tensor:
        assert at.target_log_probs_CV is not None, "only labels do without the target"
        if at.log_coverage_C is None or not self.counts_acceptance:
            return at.target_log_probs_CV
        return at.target_log_probs_CV + at.log_coverage_C[:, None]

    def _missed(self, at: Compared) -> Tensor | float:
        """Of tokens that are not compared |p - q| is p."""
        if at.log_coverage_C is None or not self.missed_weight:
            return 0.0
        return self.missed_weight * -torch.expm1(at.log_coverage_C)


class DivergenceTerm(ObjectiveTerm):
    """A term that compares both models at each token. Your own: docs/guides/add_a_divergence.md."""

    @abstractmethod
    def divergence(self, target_log_probs: Tensor, draft_log_probs: Tensor) -> Tensor:
        """One value a token, differentiable in the draft: log-probabilities [..., V] -> [...]."""

    def per_token(self, at: Compared) -> Tensor:
        return self.divergence(self._seen_target(at), at.draft_log_probs_CV) + self._missed(at)


class ForwardKL(DivergenceTerm):
    """KL(target || draft)."""

    kind: Literal["forward_kl"] = "forward_kl"

    def divergence(self, target_log_probs: Tensor, draft_log_probs: Tensor) -> Tensor:
        return divergences.forward_kl(target_log_probs, draft_log_probs)

    def native_term(self) -> Term:
        return Term(DivergenceKind.FORWARD_KL, self.weight)


class ReverseKL(DivergenceTerm):
    """KL(draft || target)."""

    kind: Literal["reverse_kl"] = "reverse_kl"

    def divergence(self, target_log_probs: Tensor, draft_log_probs: Tensor) -> Tensor:
        return divergences.reverse_kl(target_log_probs, draft_log_probs)

    def native_term(self) -> Term:
        return Term(DivergenceKind.REVERSE_KL, self.weight)


class JSD(DivergenceTerm):
    """beta KL(target || mixture) + (1 - beta) KL(draft || mixture)."""

    kind: Literal["jsd"] = "jsd"
    beta: float = 0.5

    @field_validator("beta")
    @classmethod
    def _inside(cls, beta: float) -> float:
        divergences.check_beta(beta)
        return beta

    def divergence(self, target_log_probs: Tensor, draft_log_probs: Tensor) -> Tensor:
        return divergences.jsd(target_log_probs, draft_log_probs, beta=self.beta)

    def native_term(self) -> Term:
        return Term(DivergenceKind.JSD, self.weight, self.beta)


class TVD(DivergenceTerm):
    """1 - acceptance, sum_v min(p, q); of a draft that proposes some tokens, over those."""

    kind: Literal["tvd"] = "tvd"
    counts_acceptance: ClassVar[bool] = True
    missed_weight: ClassVar[float] = 0.5

    def divergence(self, target_log_probs: Tensor, draft_log_probs: Tensor) -> Tensor:
        return divergences.tvd(target_log_probs, draft_log_probs)

    def native_term(self) -> Term:
        return Term(DivergenceKind.TVD, self.weight)


class NegativeLogAcceptance(DivergenceTerm):
    """-log acceptance, counted as in TVD."""

    kind: Literal["negative_log_acceptance"] = "negative_log_acceptance"
    counts_acceptance: ClassVar[bool] = True

    def divergence(self, target_log_probs: Tensor, draft_log_probs: Tensor) -> Tensor:
        return divergences.negative_log_acceptance(target_log_probs, draft_log_probs)

    def native_term(self) -> Term:
        return Term(DivergenceKind.NEGATIVE_LOG_ACCEPTANCE, self.weight)


class TVDPlusPlus(ObjectiveTerm):
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
    counts_acceptance: ClassVar[bool] = True
    missed_weight: ClassVar[float] = 0.5

    @property
    def needs_all_tokens(self) -> str | None:
        uniform = self.estimator == "uniform"
        return "tvd_plus_plus uniform weighs all tokens alike" if uniform else None

    def per_token(self, at: Compared) -> Tensor:
        assert at.policy is not None, "TVD++ reads the whole batch first"
        given = self._seen_target(at), at.draft_log_probs_CV
        return tvd_plus_plus(*given, self.estimator, *at.policy) + self._missed(at)


class UnderRule(DivergenceTerm):
    """What the rule that will be served makes of the draft.

    Attributes:
        rule: By its tag and parameters, such as `{rule: opt, alpha: 0.2}`.
        loss: What it rejects, the same in the logarithm, or KL(pi || draft).
    """

    kind: Literal["rule"] = "rule"
    rule: RuleChoice
    loss: RuleLoss = "rejection"

    @property
    def needs_all_tokens(self) -> str | None:
        return "a rule looks at whole distributions"

    @model_validator(mode="after")
    def _has_an_aim(self) -> UnderRule:
        even = torch.full((2,), 0.5)
        if self.loss == "forward_kl" and self.rule.aim(Position.of(even, even)) is None:
            raise ValueError(
                f"{self.rule.name} states no distribution to aim at; use rejection or "
                "negative_log_acceptance as loss"
            )
        return self

    def divergence(self, target_log_probs: Tensor, draft_log_probs: Tensor) -> Tensor:
        return rule_loss(self.rule, target_log_probs, draft_log_probs, self.loss)


class CrossEntropy(ObjectiveTerm):
    """-log draft(label): the labels alone, as when only the target's text can be had."""

    kind: Literal["cross_entropy"] = "cross_entropy"
    reads_target: ClassVar[bool] = False

    @property
    def needs_all_tokens(self) -> str | None:
        return "cross_entropy needs every label"

    def per_token(self, at: Compared) -> Tensor:
        return -at.draft_log_probs_CV.gather(-1, at.labels_C[:, None]).squeeze(-1)

    def native_term(self) -> Term:
        return Term(DivergenceKind.CROSS_ENTROPY, self.weight)


AnyTerm: TypeAlias = (
    ForwardKL
    | ReverseKL
    | JSD
    | TVD
    | NegativeLogAcceptance
    | TVDPlusPlus
    | UnderRule
    | CrossEntropy
)

if TYPE_CHECKING:
    Objective: TypeAlias = ObjectiveTerm
else:
    Objective = variants(AnyTerm, "kind", ObjectiveTerm)
    """A term in a configuration: built-in, or `{import: package.module:Name, ...}`."""


def as_terms(value: Any) -> Any:
    """Accept `tvd`, `{kind: tvd}`, `{rule: {...}}` and `[{kind: tvd}, forward_kl]` alike."""
    terms = value if isinstance(value, list | tuple) else [value]
    return [_as_term(term) for term in terms]


def _as_term(term: Any) -> Any:
    if isinstance(term, dict) and "rule" in term and IMPORT not in term:
        return {"kind": "rule"} | term
    return term


def reads_target(terms: Sequence[ObjectiveTerm]) -> bool:
    """Whether the target's probabilities are needed, or labels do."""
    return any(term.reads_target for term in terms)


def counts_acceptance(terms: Sequence[ObjectiveTerm]) -> bool:
    """Whether a term is of what is accepted, so that it needs the target's whole distribution."""
    return any(term.counts_acceptance for term in terms)


def token_losses(
    terms: Sequence[ObjectiveTerm],
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
        target_log_probs_CV: See `Compared`, as the others.
        draft_log_probs_CV: The same.
        labels_C: Places of the labels.
        policies: A term's own, for TVD++.
        log_coverage_C: Log of the target's mass on these tokens; None: it is 1.
    """
    given = target_log_probs_CV, draft_log_probs_CV, labels_C
    losses = [
        term.weight * term.per_token(Compared(*given, policy, log_coverage_C))
        for term, policy in zip(terms, policies or [None] * len(terms), strict=True)
    ]
    return sum(losses[1:], start=losses[0])


def native_terms(terms: Sequence[ObjectiveTerm]) -> list[Term] | None:
    """The objective in C; None where the class of some term declares no native form."""
    found = [term.native_term() for term in terms if "native_term" in vars(type(term))]
    known = [term for term in found if term is not None]
    return known if len(known) == len(terms) else None
