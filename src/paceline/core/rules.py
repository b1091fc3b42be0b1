"""All acceptance rules: lossless, lenient and lossy ones, and speculative cascades.

The first keep close to p. A cascade follows the draft or defers to the target, and states a
distribution pi(q, p). It accepts a drafted token with probability min(1, pi/q), recovers from
norm((pi - q)_+) and draws the bonus token from pi. A binary cascade chooses pi = q or pi = p per
position; a token-specific one moves the draft's mass on deferred tokens to p. That sharpens the
distribution: pi differs from p even if q = p, and rejections may grow with alpha.

Confidences (largest probability, entropy) use the untempered distributions `*_raw`: at temperature
0, p and q are one-hot.

Paper: Narasimhan et al. 2024, table 1, equations 2, 5, 10, 11, 13 to 15, algorithms 4 to 6, for
cascades.
"""

from __future__ import annotations

import operator
from abc import abstractmethod
from functools import reduce
from itertools import product
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

import torch
from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass
from torch import Tensor

from paceline.core.divergences import total_variation
from paceline.core.rule_base import (
    STRICT,
    Position,
    Rule,
    capped_ratio,
    normalised_excess,
)

if TYPE_CHECKING:
    from paceline.core.sampling import SamplingParams

# Newton steps, at most one per piece of the sum; real distributions need about four.
_MOST_PIECES = 200

Finite = Annotated[float, Field(allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True, config=STRICT)
class Lossless(Rule):
    """Accept min(1, p/q), recover from norm((p - q)_+): the text follows p.

    Paper: Zhou et al. 2023, section 3 and algorithm A.1.
    """

    rule: Literal["lossless"] = "lossless"
    grid = tuple(product())
    exact = True
    entrywise = True
    capturable = True

    def accept_at(self, at: Position) -> Tensor:
        return capped_ratio(at.target, at.draft)

    def residual_at(self, at: Position) -> Tensor:
        return normalised_excess(at.target, at.draft, fallback=at.target)

    def pi_at(self, at: Position) -> Tensor:
        return at.target


class _Relaxed(Rule):
    """Base class of rules that accept min(1, f(p)/q), and at temperature 0 relax the argmax."""

    @abstractmethod
    def relaxed(self, probs: Tensor) -> Tensor:
        """f(p), at least p."""

    @property
    @abstractmethod
    def strict(self) -> bool:
        """True if f(p) = p."""

    def reads_raw(self, sampling: SamplingParams) -> bool:
        return sampling.greedy and not self.strict

    def accept_at(self, at: Position) -> Tensor:
        return self._accepted(at, at)

    def accept_tokens_at(self, at: Position, tokens: Tensor) -> Tensor:
        if type(self).accept_at is not _Relaxed.accept_at:  # a subclass with its own acceptance
            return super().accept_tokens_at(at, tokens)
        return self._accepted(at.of_tokens(tokens), at)

    def _accepted(self, part: Position, whole: Position) -> Tensor:
        """Acceptance of the tokens of `part`, from the distributions over all tokens."""
        accepted = capped_ratio(self.relaxed(part.target), part.draft)
        if self.strict or whole.target_raw is whole.target:
            return accepted
        # float64, so that f(p) of a token as likely as the best one does not round below it
        peak = whole.target_raw.amax(-1, keepdim=True).double()
        kept = self.relaxed(part.target_raw.double()) >= peak
        return torch.where(_is_one_hot(whole.target), kept.to(accepted.dtype), accepted)


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

    Attributes:
        kind: Shape of the lenience: p/epsilon, p/epsilon^2 or p^epsilon.
        epsilon: 1 is lossless; smaller values accept more draft tokens.
    """

    kind: Literal["linear", "square", "exponential"] = "linear"
    epsilon: float = Field(default=1.0, gt=0, le=1)
    rule: Literal["lenient"] = "lenient"
    definition = (
        "accept a drafted token with probability min(1, f(p) / q). f is p / epsilon (linear), p /"
        " epsilon squared (square) or p to the power of epsilon (exponential); epsilon 1 is "
        "lossless. At temperature 0: if f(p) is at least the largest p, with p before "
        "temperature."
    )
    grid = (
        *product(["linear"], (0.8, 0.6, 0.4, 0.2, 0.1)),
        *product(["square"], (0.8, 0.6, 0.4)),
        *product(["exponential"], (0.8, 0.6, 0.4, 0.2)),
    )
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

    def residual_at(self, at: Position) -> Tensor:
        return normalised_excess(at.target, at.draft, fallback=at.target)


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

    Attributes:
        alpha: 0 is lossless; larger values accept more draft tokens.
        beta: Divides the target in the residual; tuned: solved at each position.
    """

    alpha: float = Field(ge=0, lt=1)
    beta: Annotated[float, Field(gt=0, allow_inf_nan=False)] | Literal["tuned"] = 1.0
    rule: Literal["lossy"] = "lossy"
    definition = (
        "accept with probability min(1, p / ((1 - alpha) q)); beta scales p where a rejected "
        "token is replaced. At temperature 0: if p / (1 - alpha) is at least the largest p, with "
        "p before temperature."
    )
    grid = tuple(product((0.2, 0.4, 0.6, 0.8, 0.9), ["tuned"]))
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

    def residual_at(self, at: Position) -> Tensor:
        if self.beta == "tuned":
            return normalised_excess(at.target * self._tuned(at), at.draft, fallback=at.target)
        return normalised_excess(at.target / self.beta, at.draft, fallback=at.target)

    def pi_at(self, at: Position) -> Tensor | None:
        if self.beta != "tuned":
            return None
        kept = torch.minimum(at.draft, self.relaxed(at.target))
        pi = torch.maximum(kept, at.target * self._tuned(at))
        if self.strict or at.target_raw is at.target:
            return pi
        return torch.where(_is_one_hot(at.target), self.induced_at(at), pi)

    def _tuned(self, at: Position) -> Tensor:
        return tuned_inverse_beta(at.target, at.draft, self.alpha).to(at.target.dtype)


def tuned_inverse_beta(target_probs: Tensor, draft_probs: Tensor, alpha: float) -> Tensor:
    """1/beta that solves sum (p/beta - q)_+ = sum (q - p/(1 - alpha))_+: recovered mass = rejected.

    The left side is convex and piecewise linear in 1/beta. With the tokens v where it is positive,
    a piece has its root at (rejected + sum q(v)) / sum p(v). Newton's method from beta = 1 descends
    from piece to piece and ends at the exact root.

    Shapes: [..., V] probabilities -> [..., 1] in [0, 1], float64.
    Paper: Narasimhan et al. 2024, section E.6.
    """
    target, draft = target_probs.double(), draft_probs.double()
    rejected = (draft - target / (1 - alpha)).clamp(min=0).sum(-1, keepdim=True)
    inverse = torch.ones_like(rejected)
    for _ in range(_MOST_PIECES):
        # In place on numbers: a comparison that returns booleans takes several times as long.
        above = (target * inverse).sub_(draft).gt_(0)
        slope, kept = (_dot(above, probs) for probs in (target, draft))
        lower = torch.where(slope > 0, (rejected + kept) / slope, inverse).clamp(min=0)
        if not (lower < inverse).any():
            break
        inverse = torch.minimum(inverse, lower)
    return inverse


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """sum_v a(v) b(v), [..., V] -> [..., 1]."""
    return (a[..., None, :] @ b[..., None])[..., 0]


class Cascade(Rule):
    """Base class of cascades; subclasses define where the draft defers to the target."""

    needs_draft_at_bonus = True
    uses_confidence = True

    @abstractmethod
    def defers(self, at: Position) -> Tensor:
        """Where to defer to the target: bool, [..., 1] per position or [..., V] per token."""

    def pi_at(self, at: Position) -> Tensor:
        deferred = self.defers(at)
        if deferred.shape[-1] == 1:
            return torch.where(deferred, at.target, at.draft)
        if at.draft.requires_grad:
            deferred_mass = torch.where(deferred, at.draft, 0)  # keeps a byte per entry
        else:  # takes a quarter of the time; with booleans half
            deferred_mass = at.draft * deferred.view(torch.uint8).to(at.draft)
        return at.draft - deferred_mass + at.target * deferred_mass.sum(-1, keepdim=True)

    def accept_at(self, at: Position) -> Tensor:
        return capped_ratio(self.pi_at(at), at.draft)

    def residual_at(self, at: Position) -> Tensor:
        pi = self.pi_at(at)
        return normalised_excess(pi, at.draft, fallback=pi)


class BinaryCascade(Cascade):
    """Follows q or p at each position: pi = (1 - delta) q + delta p, delta in {0, 1}."""


@dataclass(frozen=True, config=STRICT)
class BiLDRule(BinaryCascade):
    """Defers where D(q, p) > threshold, D = -sum_v q(v) log p(v) in nats.

    p is untempered. At temperature 0 q is one-hot, so D = -log p(argmax q).
    Paper: Narasimhan et al. 2024, sections 5 and E.1, after Kim et al. 2023.

    Attributes:
        threshold: Surprisal (nats) above which the target replaces the draft token.
    """

    threshold: float = Field(ge=0, allow_inf_nan=False)
    rule: Literal["bild"] = "bild"
    definition = (
        "defer to the target where the cross entropy of the draft with the target is above a "
        "threshold; after Kim et al. 2023."
    )
    grid = tuple(product((1.0, 2.0, 3.0, 5.0, 8.0)))
    capturable = True

    def defers(self, at: Position) -> Tensor:
        return _cross_entropy(at.draft, at.target_raw) > self.threshold


@dataclass(frozen=True, config=STRICT)
class Chow(BinaryCascade):
    """Defer where the draft's largest probability is below 1 - alpha."""

    alpha: Share
    rule: Literal["chow"] = "chow"
    grid = tuple(product((0.2, 0.4, 0.6, 0.8, 0.9, 1.0)))
    capturable = True

    def defers(self, at: Position) -> Tensor:
        return _peak(at.draft_raw) < 1 - self.alpha


@dataclass(frozen=True, config=STRICT)
class ChowLog(BinaryCascade):
    """Defer where the draft's entropy is above alpha."""

    alpha: Finite
    rule: Literal["chow_log"] = "chow_log"
    grid = tuple(product((0.5, 1.0, 2.0, 3.0, 4.0)))
    capturable = True

    def defers(self, at: Position) -> Tensor:
        return -_negentropy(at.draft_raw) > self.alpha


@dataclass(frozen=True, config=STRICT)
class Diff(BinaryCascade):
    """Defer where the target's largest probability is above the draft's by alpha."""

    alpha: Finite
    rule: Literal["diff"] = "diff"
    grid = tuple(product((-0.4, -0.2, 0.0, 0.1, 0.2, 0.4, 0.6)))
    capturable = True

    def defers(self, at: Position) -> Tensor:
        return _peak(at.draft_raw) < _peak(at.target_raw) - self.alpha


@dataclass(frozen=True, config=STRICT)
class DiffLog(BinaryCascade):
    """Defer where the draft's entropy is above the target's by alpha."""

    alpha: Finite
    rule: Literal["diff_log"] = "diff_log"
    grid = tuple(product((-2.0, -1.0, 0.0, 0.5, 1.0, 2.0)))
    capturable = True

    def defers(self, at: Position) -> Tensor:
        return _negentropy(at.draft_raw) < _negentropy(at.target_raw) - self.alpha


@dataclass(frozen=True, config=STRICT)
class Opt(BinaryCascade):
    """`Diff` with alpha weighted by the cost of deferral: max q < max p - alpha TVD(p, q).

    Equation 10, the plug-in estimate of the optimal rule. TVD is of the tempered distributions; at
    temperature 0 it is 0 or 1, and the rule generates the same texts as `Diff` (lemma 8).
    """

    alpha: Finite
    rule: Literal["opt"] = "opt"
    definition = (
        "defer where the target's largest probability is above the draft's by alpha times the TVD"
        " of the two distributions."
    )
    grid = tuple(product((-0.4, 0.0, 0.2, 0.4, 0.6, 0.9)))
    capturable = True

    def defers(self, at: Position) -> Tensor:
        margin = self.alpha * total_variation(at.target, at.draft)[..., None]
        return _peak(at.draft_raw) < _peak(at.target_raw) - margin


@dataclass(frozen=True, config=STRICT)
class OptLog(BinaryCascade):
    """`DiffLog` with alpha weighted by the cost of deferral: -H(q) < -H(p) - alpha TVD(p, q)."""

    alpha: Finite
    rule: Literal["opt_log"] = "opt_log"
    definition = (
        "defer where the draft's entropy is above the target's by alpha times the TVD of the two "
        "distributions."
    )
    grid = tuple(product((-2.0, 0.0, 1.0, 2.0, 4.0)))
    capturable = True

    def defers(self, at: Position) -> Tensor:
        margin = self.alpha * total_variation(at.target, at.draft)[..., None]
        return _negentropy(at.draft_raw) < _negentropy(at.target_raw) - margin


@dataclass(frozen=True, config=STRICT)
class TokenV1(Cascade):
    """Defer the tokens whose draft probability is below the target's largest - alpha."""

    alpha: Finite
    rule: Literal["token_v1"] = "token_v1"
    grid = tuple(product((0.0, 0.2, 0.4, 0.6)))
    capturable = True

    def defers(self, at: Position) -> Tensor:
        return at.draft_raw < _peak(at.target_raw) - self.alpha


@dataclass(frozen=True, config=STRICT)
class TokenV2(Cascade):
    """Defer the tokens whose target probability is below the target's largest - alpha."""

    alpha: Finite
    rule: Literal["token_v2"] = "token_v2"
    grid = tuple(product((0.0, 0.1, 0.2, 0.4, 0.6)))
    capturable = True

    def defers(self, at: Position) -> Tensor:
        return at.target_raw < _peak(at.target_raw) - self.alpha


@dataclass(frozen=True, config=STRICT)
class TokenV3(Cascade):
    """Defer the tokens whose target probability is below (1 - alpha) times the target's largest."""

    alpha: Share
    rule: Literal["token_v3"] = "token_v3"
    grid = tuple(product((0.0, 0.2, 0.4, 0.6, 0.8, 0.9, 0.97)))
    capturable = True

    def defers(self, at: Position) -> Tensor:
        return at.target_raw < (1 - self.alpha) * _peak(at.target_raw)


def _peak(probs: Tensor) -> Tensor:
    return probs.amax(-1, keepdim=True)


def _negentropy(probs: Tensor) -> Tensor:
    """sum p log p in nats, with 0 log 0 = 0, without gradients."""
    probs = probs.detach()
    # The logarithm of 0 and of subnormal numbers, which add nothing, takes eight times as long.
    logs = probs.clamp(min=torch.finfo(probs.dtype).tiny).log_()
    return logs.mul_(probs).sum(-1, keepdim=True)


def _cross_entropy(draft: Tensor, target: Tensor) -> Tensor:
    """-sum q log p, with 0 log 0 = 0, without gradients; three times as fast as `xlogy`."""
    products = target.detach().log().mul_(draft.detach())  # NaN where both are 0
    return -products.nansum(-1, keepdim=True).double()  # infinity exceeds any finite threshold


RULES: tuple[type[Rule], ...] = tuple(
    kind
    for kind in list(globals().values())
    if isinstance(kind, type) and issubclass(kind, Rule) and "rule" in vars(kind)
)
"""The built-in rules: the classes of this module with a tag."""

DEFAULT_RULES = tuple(kind(*arguments) for kind in RULES for arguments in kind.grid)
"""Settings of the built-in rules that `analyze` and `tune` compare by default."""

if TYPE_CHECKING:
    AnyRule: TypeAlias = Rule
else:
    AnyRule = reduce(operator.or_, RULES)
    """One of the built-in rules; `rule` tells them apart."""
