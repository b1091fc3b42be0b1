"""Rules that stay close to p (lossless, lenient, lossy), and the union of all rules, by `rule`."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

import torch
from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass
from torch import Tensor

from paceline.core.cascade_rules import (
    BiLDRule,
    Chow,
    ChowLog,
    Diff,
    DiffLog,
    Opt,
    OptLog,
    TokenV1,
    TokenV2,
    TokenV3,
)
from paceline.core.rule_base import (
    STRICT,
    NativeForm,
    Position,
    Rule,
    Sampling,
    capped_ratio,
    normalised_excess,
)
from paceline.extensions import variants

# Newton steps, at most one per piece of the sum; real distributions need about ten.
_MOST_PIECES = 200


@dataclass(frozen=True, config=STRICT)
class Lossless(Rule):
    """Accept min(1, p/q), recover from norm((p - q)_+): the text follows p.

    Paper: Zhou et al. 2023, section 3 and algorithm A.1.
    """

    rule: Literal["lossless"] = "lossless"
    exact = True
    entrywise = True
    capturable = True

    def accept(self, at: Position) -> Tensor:
        return capped_ratio(at.target, at.draft)

    def recover(self, at: Position) -> Tensor:
        return normalised_excess(at.target, at.draft, fallback=at.target)

    def aim(self, at: Position) -> Tensor:
        return at.target

    def native_form(self) -> NativeForm:
        return NativeForm("LOSSLESS")


class _Relaxed(Rule):
    """Base class of rules that accept min(1, f(p)/q), and at temperature 0 relax the argmax."""

    @abstractmethod
    def relaxed(self, probs: Tensor) -> Tensor:
        """f(p), at least p."""

    @property
    @abstractmethod
    def strict(self) -> bool:
        """True if f(p) = p."""

    def reads_raw(self, sampling: Sampling) -> bool:
        return sampling.greedy and not self.strict

    def accept(self, at: Position) -> Tensor:
        accepted = capped_ratio(self.relaxed(at.target), at.draft)
        if self.strict or at.target_raw is at.target:
            return accepted
        # float64, as in native/rules.c, so that ties break equally
        raw = at.target_raw.double()
        kept = self.relaxed(raw) >= raw.amax(-1, keepdim=True)
        return torch.where(_is_one_hot(at.target), kept.to(accepted.dtype), accepted)


def _is_one_hot(probs: Tensor) -> Tensor:
    is_alone = (probs > 0).sum(-1, keepdim=True) == 1
    return is_alone & (probs.amax(-1, keepdim=True) == 1)


@dataclass(frozen=True, config=STRICT)
class Lenient(_Relaxed):
    """Accept min(1, f(p)/q), recover from norm((p - q)_+).

    f is p/epsilon (linear), p/epsilon^2 (square) or p^epsilon (exponential); epsilon 1 is lossless.

    At temperature 0 (p one-hot, `target_raw` given) v is accepted if f(p_raw(v)) >= max p_raw,
    where p_raw is untempered, without top-k and top-p. The most likely token replaces a rejected
    one. With epsilon 1 no other token is accepted, even if it is as likely.
    Paper: Zhou et al. 2023, section 4 (lossy) and algorithm A.1; at temperature 0 Leviathan et al.
    2023, appendix on lenience.
    """

    kind: Literal["linear", "square", "exponential"] = "linear"
    epsilon: float = Field(default=1.0, gt=0, le=1)
    rule: Literal["lenient"] = "lenient"
    entrywise = True
    capturable = True

    @property
    def strict(self) -> bool:
        return self.epsilon == 1

    def relaxed(self, probs: Tensor) -> Tensor:
        match self.kind:
            case "linear":
                return probs / self.epsilon
            case "square":
                return probs / self.epsilon**2
            case "exponential":
                return probs**self.epsilon

    def recover(self, at: Position) -> Tensor:
        return normalised_excess(at.target, at.draft, fallback=at.target)

    def native_form(self) -> NativeForm:
        return NativeForm(f"LENIENT_{self.kind.upper()}", self.epsilon)


@dataclass(frozen=True, config=STRICT)
class Lossy(_Relaxed):
    """Accept min(1, p/((1 - alpha) q)), recover from norm((p/beta - q)_+), beta >= 1 - alpha.

    beta = 1 equals `Lenient("linear", 1 - alpha)`. The paper's stated distribution
    max{min{q, p/(1 - alpha)}, p/beta} sums to 1 for one beta per position: beta="tuned" solves for
    it, and `pi` is that distribution. For other values of beta `pi` is None.

    At temperature 0 v is accepted if p_raw(v)/(1 - alpha) >= max p_raw, as with linear lenience,
    and the most likely token replaces a rejected one, for every beta. With beta="tuned" the bonus
    token, too, is the draft's token if the rule accepts it.
    Paper: Narasimhan et al. 2024, sections 2 and E.6, and section 4.4 and figure 5 at temperature
    0. Differs: beta is solved for, not searched for on a grid.
    """

    alpha: float = Field(ge=0, lt=1)
    beta: Annotated[float, Field(gt=0, allow_inf_nan=False)] | Literal["tuned"] = 1.0
    rule: Literal["lossy"] = "lossy"
    entrywise = True

    @property
    def needs_draft_at_bonus(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.beta == "tuned"

    @property
    def capturable(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.beta != "tuned"

    @model_validator(mode="after")
    def _check_beta(self) -> Lossy:
        # Tolerance: 1 - 0.7 exceeds 0.3 by a rounding error.
        if self.beta != "tuned" and self.beta < (1 - self.alpha) * (1 - 1e-9):
            raise ValueError(f"lossy beta must be at least 1 - alpha = {1 - self.alpha:g}")
        return self

    @property
    def strict(self) -> bool:
        return self.alpha == 0

    def relaxed(self, probs: Tensor) -> Tensor:
        return probs / (1 - self.alpha)

    def recover(self, at: Position) -> Tensor:
        if self.beta == "tuned":
            return normalised_excess(at.target * self._tuned(at), at.draft, fallback=at.target)
        return normalised_excess(at.target / self.beta, at.draft, fallback=at.target)

    def aim(self, at: Position) -> Tensor | None:
        if self.beta != "tuned":
            return None
        kept = torch.minimum(at.draft, self.relaxed(at.target))
        aim = torch.maximum(kept, at.target * self._tuned(at))
        if self.strict or at.target_raw is at.target:
            return aim
        return torch.where(_is_one_hot(at.target), self.induced(at), aim)

    def native_form(self) -> NativeForm:
        if self.beta == "tuned":
            return NativeForm("LOSSY_TUNED", self.alpha)
        return NativeForm("LOSSY", self.alpha, self.beta)

    def _tuned(self, at: Position) -> Tensor:
        return tuned_inverse_beta(at.target, at.draft, self.alpha).to(at.target.dtype)


def tuned_inverse_beta(target_probs: Tensor, draft_probs: Tensor, alpha: float) -> Tensor:
    """1/beta that solves sum (p/beta - q)_+ = sum (q - p/(1 - alpha))_+: recovered mass = rejected.

    Newton's method from beta = 1. The left side is convex and piecewise linear in 1/beta, so the
    iteration descends from piece to piece and ends at the exact root.

    Shapes: [..., V] probabilities -> [..., 1] in [0, 1], float64.
    Paper: Narasimhan et al. 2024, section E.6.
    """
    target, draft = target_probs.double(), draft_probs.double()
    rejected = (draft - target / (1 - alpha)).clamp(min=0).sum(-1, keepdim=True)
    inverse = torch.ones_like(rejected)
    for _ in range(_MOST_PIECES):
        excess = target * inverse - draft
        above = excess > 0
        surplus = torch.where(above, excess, 0).sum(-1, keepdim=True) - rejected
        slope = torch.where(above, target, 0).sum(-1, keepdim=True)
        lower = torch.where(slope > 0, inverse - surplus / slope, inverse).clamp(min=0)
        if not (lower < inverse).any():
            break
        inverse = torch.minimum(inverse, lower)
    return inverse


_CloseToTarget: TypeAlias = Lossless | Lenient | Lossy
_BinaryCascade: TypeAlias = BiLDRule | Chow | ChowLog | Diff | DiffLog | Opt | OptLog
AnyRule: TypeAlias = _CloseToTarget | _BinaryCascade | TokenV1 | TokenV2 | TokenV3

if TYPE_CHECKING:
    RuleChoice: TypeAlias = Rule
else:
    RuleChoice = variants(AnyRule, "rule", Rule)
    """A field of a configuration: a built-in rule, or `{import: package.module:Name, ...}`."""
