"""Speculative cascades: rules that follow the draft or defer to the target, per position or token.

Each rule states a distribution pi(q, p). It accepts a drafted token with probability min(1, pi/q),
recovers from norm((pi - q)_+) and draws the bonus token from pi. A binary rule chooses pi = q or
pi = p per position; a token-specific rule moves the draft's mass on deferred tokens to p. That
sharpens the distribution: pi differs from p even if q = p, and rejections may grow with alpha.

Confidences (largest probability, entropy) use the untempered distributions `*_raw`: at temperature
0, p and q are one-hot.

Paper: Narasimhan et al. 2024, table 1, equations 2, 5, 10, 11, 13 to 15, algorithms 4 to 6.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from paceline.core.divergences import total_variation
from paceline.core.rule_base import (
    STRICT,
    NativeForm,
    Position,
    Rule,
    capped_ratio,
    normalised_excess,
)

Finite = Annotated[float, Field(allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]


class Cascade(Rule):
    """Base class of cascades; subclasses define where the draft defers to the target."""

    needs_draft_at_bonus = True
    uses_confidence = True

    @abstractmethod
    def defers(self, at: Position) -> Tensor:
        """Where to defer to the target: bool, [..., 1] per position or [..., V] per token."""

    def aim(self, at: Position) -> Tensor:
        deferred = self.defers(at)
        if deferred.shape[-1] == 1:
            return torch.where(deferred, at.target, at.draft)
        deferred_mass = torch.where(deferred, at.draft, 0)
        return at.draft - deferred_mass + at.target * deferred_mass.sum(-1, keepdim=True)

    def accept(self, at: Position) -> Tensor:
        return capped_ratio(self.aim(at), at.draft)

    def recover(self, at: Position) -> Tensor:
        aim = self.aim(at)
        return normalised_excess(aim, at.draft, fallback=aim)


class BinaryCascade(Cascade):
    """Follows q or p at each position: pi = (1 - delta) q + delta p, delta in {0, 1}."""


def _native_form(self: Any) -> NativeForm:
    """For rules whose native kind is their tag in upper case."""
    return NativeForm(self.rule.upper(), self.alpha)


@dataclass(frozen=True, config=STRICT)
class BiLDRule(BinaryCascade):
    """Defers where D(q, p) > threshold, D = -sum_v q(v) log p(v) in nats.

    p is untempered. At temperature 0 q is one-hot, so D = -log p(argmax q).
    Paper: Narasimhan et al. 2024, sections 5 and E.1, after Kim et al. 2023.
    """

    threshold: float = Field(ge=0, allow_inf_nan=False)
    rule: Literal["bild"] = "bild"
    capturable = True

    def defers(self, at: Position) -> Tensor:
        return -torch.xlogy(at.draft, at.target_raw).sum(-1, keepdim=True) > self.threshold

    def native_form(self) -> NativeForm:
        return NativeForm("BILD", self.threshold)


@dataclass(frozen=True, config=STRICT)
class Chow(BinaryCascade):
    """Defers where the draft is uncertain: max q < 1 - alpha. Equation 2."""

    alpha: Share
    rule: Literal["chow"] = "chow"
    capturable = True
    native_form = _native_form

    def defers(self, at: Position) -> Tensor:
        return _peak(at.draft_raw) < 1 - self.alpha


@dataclass(frozen=True, config=STRICT)
class ChowLog(BinaryCascade):
    """Defers where the draft is uncertain: entropy(q) > alpha, in nats."""

    alpha: Finite
    rule: Literal["chow_log"] = "chow_log"
    capturable = True
    native_form = _native_form

    def defers(self, at: Position) -> Tensor:
        return _entropy(at.draft_raw) > self.alpha


@dataclass(frozen=True, config=STRICT)
class Diff(BinaryCascade):
    """Defers where the target is more confident by alpha: max q < max p - alpha. Equation 5."""

    alpha: Finite
    rule: Literal["diff"] = "diff"
    capturable = True
    native_form = _native_form

    def defers(self, at: Position) -> Tensor:
        return _peak(at.draft_raw) < _peak(at.target_raw) - self.alpha


@dataclass(frozen=True, config=STRICT)
class DiffLog(BinaryCascade):
    """Defers where the target is more confident by alpha: -H(q) < -H(p) - alpha, in nats."""

    alpha: Finite
    rule: Literal["diff_log"] = "diff_log"
    capturable = True
    native_form = _native_form

    def defers(self, at: Position) -> Tensor:
        return -_entropy(at.draft_raw) < -_entropy(at.target_raw) - self.alpha


@dataclass(frozen=True, config=STRICT)
class Opt(BinaryCascade):
    """`Diff` with alpha weighted by the cost of deferral: max q < max p - alpha TVD(p, q).

    Equation 10, the plug-in estimate of the optimal rule. TVD is of the tempered distributions; at
    temperature 0 it is 0 or 1, and the rule generates the same texts as `Diff` (lemma 8).
    """

    alpha: Finite
    rule: Literal["opt"] = "opt"
    capturable = True
    native_form = _native_form

    def defers(self, at: Position) -> Tensor:
        margin = self.alpha * total_variation(at.target, at.draft)[..., None]
        return _peak(at.draft_raw) < _peak(at.target_raw) - margin


@dataclass(frozen=True, config=STRICT)
class OptLog(BinaryCascade):
    """`DiffLog` with alpha weighted by the cost of deferral: -H(q) < -H(p) - alpha TVD(p, q)."""

    alpha: Finite
    rule: Literal["opt_log"] = "opt_log"
    capturable = True
    native_form = _native_form

    def defers(self, at: Position) -> Tensor:
        margin = self.alpha * total_variation(at.target, at.draft)[..., None]
        return -_entropy(at.draft_raw) < -_entropy(at.target_raw) - margin


@dataclass(frozen=True, config=STRICT)
class TokenV1(Cascade):
    """Defers token v where q(v) < max p - alpha. Equations 11 and 13."""

    alpha: Finite
    rule: Literal["token_v1"] = "token_v1"
    capturable = True
    native_form = _native_form

    def defers(self, at: Position) -> Tensor:
        return at.draft_raw < _peak(at.target_raw) - self.alpha


@dataclass(frozen=True, config=STRICT)
class TokenV2(Cascade):
    """Defers token v where p(v) < max p - alpha. Equations 11 and 14."""

    alpha: Finite
    rule: Literal["token_v2"] = "token_v2"
    capturable = True
    native_form = _native_form

    def defers(self, at: Position) -> Tensor:
        return at.target_raw < _peak(at.target_raw) - self.alpha


@dataclass(frozen=True, config=STRICT)
class TokenV3(Cascade):
    """Defers token v where p(v) < (1 - alpha) max p. Equations 11 and 15."""

    alpha: Share
    rule: Literal["token_v3"] = "token_v3"
    capturable = True
    native_form = _native_form

    def defers(self, at: Position) -> Tensor:
        return at.target_raw < (1 - self.alpha) * _peak(at.target_raw)


def _peak(probs: Tensor) -> Tensor:
    return probs.amax(-1, keepdim=True)


def _entropy(probs: Tensor) -> Tensor:
    return -torch.xlogy(probs, probs).sum(-1, keepdim=True)
