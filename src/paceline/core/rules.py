"""Rules that stay close to p (lossless, lenient, lossy), and the union of all rules, by `rule`."""

from __future__ import annotations

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


@dataclass(frozen=True, config=STRICT)
class Lenient(Rule):
    """Accept min(1, f(p)/q), recover from norm((p - q)_+).

    f is p/epsilon (linear), p/epsilon^2 (square) or p^epsilon (exponential); epsilon 1 is lossless.
    Paper: Zhou et al. 2023, section 4 (lossy) and algorithm A.1.
    """

    kind: Literal["linear", "square", "exponential"] = "linear"
    epsilon: float = Field(default=1.0, gt=0, le=1)
    rule: Literal["lenient"] = "lenient"
    entrywise = True
    capturable = True

    def accept(self, at: Position) -> Tensor:
        match self.kind:
            case "linear":
                relaxed = at.target / self.epsilon
            case "square":
                relaxed = at.target / self.epsilon**2
            case "exponential":
                relaxed = at.target**self.epsilon
        return capped_ratio(relaxed, at.draft)

    def recover(self, at: Position) -> Tensor:
        return normalised_excess(at.target, at.draft, fallback=at.target)

    def native_form(self) -> NativeForm:
        return NativeForm(f"LENIENT_{self.kind.upper()}", self.epsilon)


@dataclass(frozen=True, config=STRICT)
class Lossy(Rule):
    """Accept min(1, p/((1 - alpha) q)), recover from norm((p/beta - q)_+), beta >= 1 - alpha.

    beta = 1 equals `Lenient("linear", 1 - alpha)`. The paper's stated distribution
    max{min{q, p/(1 - alpha)}, p/beta} sums to 1 for one beta per position: beta="tuned" solves for
    it, and `pi` is that distribution. For other values of beta `pi` is None.
    Paper: Narasimhan et al. 2024, sections 2 and E.6. Differs: beta is solved for, not searched
    for on a grid.
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

    def accept(self, at: Position) -> Tensor:
        return capped_ratio(at.target / (1 - self.alpha), at.draft)

    def recover(self, at: Position) -> Tensor:
        if self.beta == "tuned":
            return normalised_excess(at.target * self._tuned(at), at.draft, fallback=at.target)
        return normalised_excess(at.target / self.beta, at.draft, fallback=at.target)

    def aim(self, at: Position) -> Tensor | None:
        if self.beta != "tuned":
            return None
        kept = torch.minimum(at.draft, at.target / (1 - self.alpha))
        return torch.maximum(kept, at.target * self._tuned(at))

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
