"""What the draft is trained to make small: one divergence, or a weighted sum.

Each choice is a tagged model; the mathematics is in `core.divergences`.
"""

# C tokens of a chunk, V vocabulary
from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, field_validator

from paceline.config import StrictModel
from paceline.core import divergences
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
    """1 - acceptance."""

    kind: Literal["tvd"] = "tvd"


class NegativeLogAcceptance(Weighted):
    """-log acceptance."""

    kind: Literal["negative_log_acceptance"] = "negative_log_acceptance"


class CrossEntropy(Weighted):
    """-log draft(label): the labels alone, as when only the target's text can be had."""

    kind: Literal["cross_entropy"] = "cross_entropy"


Objective = Annotated[
    ForwardKL | ReverseKL | JSD | TVD | NegativeLogAcceptance | CrossEntropy,
    Field(discriminator="kind"),
]


def as_terms(value: Any) -> Any:
    """Accept `tvd`, `{kind: tvd}` and `[{kind: tvd}, forward_kl]` alike."""
    terms = value if isinstance(value, list | tuple) else [value]
    return [{"kind": term} if isinstance(term, str) else term for term in terms]


def reads_target(terms: Sequence[Objective]) -> bool:
    """Whether the target's probabilities are needed, or labels do."""
    return any(not isinstance(term, CrossEntropy) for term in terms)


def token_losses(
    terms: Sequence[Objective],
    target_log_probs_CV: Tensor | None,
    draft_log_probs_CV: Tensor,
    labels_C: Tensor,
) -> Tensor:
    """The weighted sum of all terms for each token, in nats (TVD: a plain number). -> [C]."""
    losses = [
        term.weight * _token_loss(term, target_log_probs_CV, draft_log_probs_CV, labels_C)
        for term in terms
    ]
    return sum(losses[1:], start=losses[0])


def _token_loss(
    term: Objective, target_log_probs: Tensor | None, draft_log_probs: Tensor, labels_C: Tensor
) -> Tensor:
    if isinstance(term, CrossEntropy):
        return -draft_log_probs.gather(-1, labels_C[:, None]).squeeze(-1)
    assert target_log_probs is not None, "only cross entropy does without the target"
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
