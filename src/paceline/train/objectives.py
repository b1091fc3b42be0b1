"""Training objectives: one divergence or a weighted sum of divergences.

The formulas are in `core.divergences` and `core.tvd_plus_plus`. TVD++ also
needs token draws and reward moments of the whole batch, from `policies_of`.
"""

# C tokens of a chunk, K drawn tokens per position, N trained positions, V vocabulary
from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, TypeAlias

import torch
from pydantic import BeforeValidator, Field, field_validator, model_validator

from paceline.config import StrictModel
from paceline.core import divergences
from paceline.core.divergences import RuleLoss, rule_loss
from paceline.core.rule_base import Position
from paceline.core.sampling import sample
from paceline.core.top_k_tail import TopScores, coarsened, log_coverage
from paceline.core.tvd_plus_plus import (
    Estimator,
    RewardMoments,
    reward_moments,
    tvd_plus_plus,
)
from paceline.errors import UsageError
from paceline.extensions import IMPORT, RuleChoice, variants
from paceline.native.structures import DivergenceKind, Term

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor

    AddUp = Callable[[Tensor], Tensor]


class Policy(NamedTuple):
    """Inputs of TVD++: reward moments of the batch, and the drawn tokens of it or of a chunk."""

    moments: RewardMoments
    drawn_CK: Tensor | None

    def rows(self, rows: slice) -> Policy:
        """Those of a chunk."""
        return self if self.drawn_CK is None else Policy(self.moments, self.drawn_CK[rows])


class Compared(NamedTuple):
    """Inputs of a term's loss for a chunk, normalised over the V tokens that the draft proposes."""

    target_log_probs_CV: Tensor | None  # None if the objective uses labels only
    draft_log_probs_CV: Tensor
    labels_C: Tensor  # indices among the V tokens
    policy: Policy | None = None  # of the term, for TVD++
    log_coverage_C: Tensor | None = None  # log of the target's mass on the V tokens; None: 0
    top: TopScores | None = None  # recorded scores of a served target


class ObjectiveTerm(StrictModel, ABC):
    """A term of the objective.

    Attributes:
        weight: Factor of the term's loss.
        reads_target: True if the term needs the target's probabilities, not only labels.
        reads_top: True if the term needs recorded log-probabilities of the target.
        counts_acceptance: True if the term is a function of the acceptance, which depends on the
            target's mass on tokens that the draft does not propose.
        missed_weight: Loss per unit of this mass.
        native_kind: The divergence in C that is the term's loss, not inherited by subclasses; None:
            there is none.
        native_parameter: Parameter of the divergence in C; 0 if it has none.
        needs_all_tokens: True if the term has no meaning over a part of the vocabulary.
        num_drawn: Number of tokens that the term draws from the draft at each position.
    """

    weight: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    reads_target: ClassVar[bool] = True
    reads_top: ClassVar[bool] = False
    counts_acceptance: ClassVar[bool] = False
    missed_weight: ClassVar[float] = 0.0
    native_kind: ClassVar[DivergenceKind | None] = None
    native_parameter: ClassVar[float] = 0.0
    needs_all_tokens: ClassVar[bool] = False
    num_drawn: ClassVar[int] = 0

    @abstractmethod
    def per_token(self, at: Compared) -> Tensor:
        """The unweighted loss per token, [C]."""

    def _seen_target(self, at: Compared) -> Tensor:
        assert at.target_log_probs_CV is not None, "the term needs the target"
        if at.log_coverage_C is None or not self.counts_acceptance:
            return at.target_log_probs_CV
        return at.target_log_probs_CV + at.log_coverage_C[:, None]

    def _missed(self, at: Compared) -> Tensor | float:
        """Loss of tokens that the draft does not propose: q = 0, so |p - q| = p."""
        if at.log_coverage_C is None or not self.missed_weight:
            return 0.0
        return self.missed_weight * -torch.expm1(at.log_coverage_C)


class DivergenceTerm(ObjectiveTerm):
    """Base class of divergences; for your own, see docs/guides/add_a_divergence.md."""

    @abstractmethod
    def divergence(self, target_log_probs: Tensor, draft_log_probs: Tensor) -> Tensor:
        """Divergence per token, differentiable in the draft. Log-probs [..., V] -> [...]."""

    def per_token(self, at: Compared) -> Tensor:
        losses = self.divergence(self._seen_target(at), at.draft_log_probs_CV)
        if losses.shape != at.draft_log_probs_CV.shape[:-1]:
            raise UsageError(
                f"{type(self).__name__}.divergence returned shape {list(losses.shape)} for "
                f"log-probabilities {list(at.draft_log_probs_CV.shape)}; return one value per "
                "token, without a sum or mean over tokens"
            )
        return losses + self._missed(at)


class ForwardKL(DivergenceTerm):
    """KL(target || draft)."""

    kind: Literal["forward_kl"] = "forward_kl"
    native_kind: ClassVar = DivergenceKind.FORWARD_KL

    def divergence(self, target_log_probs: Tensor, draft_log_probs: Tensor) -> Tensor:
        return divergences.forward_kl(target_log_probs, draft_log_probs)


class ReverseKL(DivergenceTerm):
    """KL(draft || target)."""

    kind: Literal["reverse_kl"] = "reverse_kl"
    native_kind: ClassVar = DivergenceKind.REVERSE_KL

    def divergence(self, target_log_probs: Tensor, draft_log_probs: Tensor) -> Tensor:
        return divergences.reverse_kl(target_log_probs, draft_log_probs)


class JSD(DivergenceTerm):
    """beta KL(target || mixture) + (1 - beta) KL(draft || mixture)."""

    kind: Literal["jsd"] = "jsd"
    beta: float = 0.5
    native_kind: ClassVar = DivergenceKind.JSD

    @property
    def native_parameter(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.beta

    @field_validator("beta")
    @classmethod
    def _inside(cls, beta: float) -> float:
        divergences.check_beta(beta)
        return beta

    def divergence(self, target_log_probs: Tensor, draft_log_probs: Tensor) -> Tensor:
        return divergences.jsd(target_log_probs, draft_log_probs, beta=self.beta)


class TVD(DivergenceTerm):
    """1 - acceptance; the acceptance is sum_v min(p, q), v the tokens that the draft proposes."""

    kind: Literal["tvd"] = "tvd"
    counts_acceptance: ClassVar[bool] = True
    missed_weight: ClassVar[float] = 0.5
    native_kind: ClassVar = DivergenceKind.TVD

    def divergence(self, target_log_probs: Tensor, draft_log_probs: Tensor) -> Tensor:
        return divergences.tvd(target_log_probs, draft_log_probs)


class NegativeLogAcceptance(DivergenceTerm):
    """-log acceptance, with the acceptance of `TVD`."""

    kind: Literal["negative_log_acceptance"] = "negative_log_acceptance"
    counts_acceptance: ClassVar[bool] = True
    native_kind: ClassVar = DivergenceKind.NEGATIVE_LOG_ACCEPTANCE

    def divergence(self, target_log_probs: Tensor, draft_log_probs: Tensor) -> Tensor:
        return divergences.negative_log_acceptance(target_log_probs, draft_log_probs)


class TVDPlusPlus(ObjectiveTerm):
    """The policy gradient of TVD with normalised rewards.

    Reward moments are computed per accumulation step, over all processes. The result therefore
    depends on gradient_accumulation_steps, unlike that of other objectives.

    Attributes:
        estimator: Which tokens have rewards; see `core.tvd_plus_plus`.
        num_samples: Number of tokens drawn per position, for estimator `sampled`.
    """

    kind: Literal["tvd_plus_plus"] = "tvd_plus_plus"
    estimator: Estimator = "exact"
    num_samples: int = Field(default=1, ge=1)
    counts_acceptance: ClassVar[bool] = True
    missed_weight: ClassVar[float] = 0.5

    @property
    def needs_all_tokens(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.estimator == "uniform"

    @property
    def num_drawn(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.num_samples if self.estimator == "sampled" else 0

    def per_token(self, at: Compared) -> Tensor:
        assert at.policy is not None, "TVD++ needs reward moments"
        scores = self._seen_target(at), at.draft_log_probs_CV
        return tvd_plus_plus(*scores, self.estimator, *at.policy) + self._missed(at)


class UnderRule(DivergenceTerm):
    """Loss of the draft under the acceptance rule that serving will use.

    Attributes:
        rule: The rule and its parameters, such as `{rule: opt, alpha: 0.2}`.
        loss: Rejection probability, negative log acceptance, or KL(pi || draft) to the rule's pi.
    """

    kind: Literal["rule"] = "rule"
    rule: RuleChoice
    loss: RuleLoss = "rejection"
    needs_all_tokens: ClassVar[bool] = True

    @model_validator(mode="after")
    def _has_target_distribution(self) -> UnderRule:
        even = torch.full((2,), 0.5)
        if self.loss == "forward_kl" and self.rule.pi_at(Position.of(even, even)) is None:
            raise ValueError(
                f"{self.rule.name} has no target distribution for forward_kl; use rejection or "
                "negative_log_acceptance as loss"
            )
        return self

    def divergence(self, target_log_probs: Tensor, draft_log_probs: Tensor) -> Tensor:
        return rule_loss(self.rule, target_log_probs, draft_log_probs, self.loss)


class CrossEntropy(ObjectiveTerm):
    """-log draft(label); needs only the target's text, not its probabilities."""

    kind: Literal["cross_entropy"] = "cross_entropy"
    reads_target: ClassVar[bool] = False
    native_kind: ClassVar = DivergenceKind.CROSS_ENTROPY
    needs_all_tokens: ClassVar[bool] = True

    def per_token(self, at: Compared) -> Tensor:
        return -at.draft_log_probs_CV.gather(-1, at.labels_C[:, None]).squeeze(-1)


class TopKTail(ObjectiveTerm):
    """A divergence over the target's recorded tokens and the rest; see `core.top_k_tail`.

    A step with this term trains on the positions for which tokens were recorded.

    For a target that is only a URL: the text and its most likely tokens are recorded by
    `generate-data` with `writer.top_logprobs`. The target is not loaded.

    Attributes:
        divergence: Divergence of the coarse distributions, such as `tvd` or
            `{kind: jsd, beta: 0.3}`.
    """

    kind: Literal["top_k_tail"] = "top_k_tail"
    divergence: Annotated[  # those of AnyTerm that need two distributions alone
        ForwardKL | ReverseKL | JSD | TVD | NegativeLogAcceptance, Field(discriminator="kind")
    ] = ForwardKL()
    reads_target: ClassVar[bool] = False
    reads_top: ClassVar[bool] = True
    needs_all_tokens: ClassVar[bool] = True

    @field_validator("divergence", mode="before")
    @classmethod
    def _named(cls, value: Any) -> Any:
        return {"kind": value} if isinstance(value, str) else value

    def per_token(self, at: Compared) -> Tensor:
        assert at.top is not None, "checked before training"
        both = coarsened(at.top, at.draft_log_probs_CV)
        covered_C = log_coverage(at.top).to(at.draft_log_probs_CV)
        return self.divergence.per_token(Compared(*both, at.labels_C, log_coverage_C=covered_C))


AnyTerm: TypeAlias = (
    ForwardKL
    | ReverseKL
    | JSD
    | TVD
    | NegativeLogAcceptance
    | TVDPlusPlus
    | UnderRule
    | CrossEntropy
    | TopKTail
)

if TYPE_CHECKING:
    Objective: TypeAlias = ObjectiveTerm
else:
    Objective = variants(AnyTerm, "kind", ObjectiveTerm)
    """A term in a configuration: built-in, or `{import: package.module:Name, ...}`."""


def as_terms(value: Any) -> Any:
    """Convert `tvd`, `{kind: tvd}`, `{rule: {...}}` or a list of these to a list of terms."""
    terms = value if isinstance(value, list | tuple) else [value]
    return [_as_term(term) for term in terms]


def _as_term(term: Any) -> Any:
    if isinstance(term, dict) and "rule" in term and IMPORT not in term:
        return {"kind": "rule"} | term
    return term


Objectives = Annotated[tuple[Objective, ...], Field(min_length=1), BeforeValidator(as_terms)]
"""One divergence or a weighted sum, in a configuration."""


def reads_target(terms: Sequence[ObjectiveTerm]) -> bool:
    """True if a term needs the target's probabilities."""
    return any(term.reads_target for term in terms)


def reads_top(terms: Sequence[ObjectiveTerm]) -> bool:
    """True if a term needs recorded log-probabilities of the target."""
    return any(term.reads_top for term in terms)


def token_losses(
    terms: Sequence[ObjectiveTerm], at: Compared, policies: Sequence[Policy | None] = ()
) -> Tensor:
    """Weighted sum of all terms per token, in nats (TVD: in [0, 1]). -> [C].

    `policies` has the TVD++ inputs of each term; empty: none.
    """
    losses = [
        term.weight * term.per_token(at._replace(policy=policy))
        for term, policy in zip(terms, policies or [None] * len(terms), strict=True)
    ]
    return sum(losses[1:], start=losses[0])


def native_terms(terms: Sequence[ObjectiveTerm]) -> list[Term] | None:
    """The objective's terms in C; None if a term's own class does not define one."""
    kinds = [vars(type(term)).get("native_kind") for term in terms]
    if None in kinds:
        return None
    return [
        Term(kind, term.weight, term.native_parameter)
        for kind, term in zip(kinds, terms, strict=True)
    ]


def uniforms_of_terms(
    terms: Sequence[Objective], rows: Sequence[tuple[torch.Generator, int]]
) -> list[Tensor | None]:
    """Uniforms for each term's draws, [N, K]; None for terms that draw none.

    `rows` has a generator and the number of trained positions per row, so that a row's draws do
    not depend on other rows.
    """
    counts = [term.num_drawn for term in terms]
    drawn = [
        [torch.rand(length, count, generator=rng, dtype=torch.float64) for count in counts if count]
        for rng, length in rows
    ]
    columns = iter([torch.cat(parts) for parts in zip(*drawn, strict=True)])
    return [next(columns) if count else None for count in counts]


@torch.no_grad()
def policies_of(
    terms: Sequence[Objective],
    uniforms: Sequence[Tensor | None],
    chunks: Iterable[tuple[Tensor | None, Tensor]],
    add_up: AddUp,
) -> list[Policy | None]:
    """Inputs of the TVD++ terms for a batch; None for other terms.

    `chunks` has the batch in order: log-probabilities of target and draft, [C, V] each. `add_up`
    sums a tensor over all processes.
    """
    parts: list[list[Policy]] = [[] for _ in terms]
    start = 0
    if any(isinstance(term, TVDPlusPlus) for term in terms):
        for target, draft in chunks:
            assert target is not None, "TVD++ needs a target"
            rows = slice(start, start := start + len(draft))
            for term, uniforms_NK, found in zip(terms, uniforms, parts, strict=True):
                if isinstance(term, TVDPlusPlus):
                    drawn_CK = None if uniforms_NK is None else _draw(draft, uniforms_NK[rows])
                    moments = reward_moments(target, draft, term.estimator, drawn_CK)
                    found.append(Policy(moments, drawn_CK))
    return [_whole(found, add_up) if found else None for found in parts]


def _whole(parts: Sequence[Policy], add_up: AddUp) -> Policy:
    sums = torch.stack([torch.stack(part.moments) for part in parts]).sum(0)
    drawn = [part.drawn_CK for part in parts if part.drawn_CK is not None]
    return Policy(RewardMoments(*add_up(sums)), torch.cat(drawn) if drawn else None)


def _draw(log_probs_CV: Tensor, uniforms_CK: Tensor) -> Tensor:
    probs_CV, uniforms_CK = log_probs_CV.exp(), uniforms_CK.to(log_probs_CV.device)
    return torch.stack([sample(probs_CV, uniforms_C) for uniforms_C in uniforms_CK.T], -1)
