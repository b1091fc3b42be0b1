"""Speculative cascades: where to keep to the draft, and where to defer to the target.

Each states its aim pi(q, p), keeps a drafted token with min(1, pi/q), recovers from
norm((pi - q)_+), and takes the bonus from pi behind the last drafted token. A binary rule decides for
the whole position (pi is q or p), a token-specific one for each token.

A token-specific rule sharpens: what it gives up goes where p has its mass, so even equal models are
not left alone, and its rejections need not fall as alpha grows.

Confidences (largest probability, entropy) are those of the models themselves: of the untempered
distributions `*_raw`, whatever temperature the tokens are drawn at. At temperature 0 nothing else
is possible, where p and q are one-hot.

Paper: Narasimhan et al. 2024, table 1, equations 2, 5, 10, 11, 13 to 15, algorithms 4 to 6.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, Literal

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
    """A rule that states pi; subclasses say which tokens of the draft's are not good enough."""

    needs_draft_at_bonus = True
    uses_confidence = True

    @abstractmethod
    def defers(self, at: Position) -> Tensor:
        """Is the target asked? Bool, [..., 1] for the whole position or [..., V] for each token."""

    def aim(self, at: Position) -> Tensor:
        deferred = self.defers(at)
        if deferred.shape[-1] == 1:
            return torch.where(deferred, at.target, at.draft)
        given_up = torch.where(deferred, at.draft, 0)
        return at.draft - given_up + at.target * given_up.sum(-1, keepdim=True)

    def accept(self, at: Position) -> Tensor:
        return capped_ratio(self.aim(at), at.draft)

    def recover(self, at: Position) -> Tensor:
        aim = self.aim(at)
        return normalised_excess(aim, at.draft, fallback=aim)


class BinaryCascade(Cascade):
    """Follows q or p, the whole position: pi = (1 - delta) q + delta p."""


@dataclass(frozen=True, config=STRICT)
class BiLDRule(BinaryCascade):
    """Defers where D(q, p) > threshold, D = -sum_v q(v) log p(v) in nats.

    A greedy q is one-hot, so that D is -log p(argmax q) then. p is untempered.
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
    """Defers where the draft is unsure: max q < 1 - alpha. Equation 2."""

    alpha: Share
    rule: Literal["chow"] = "chow"
    capturable = True

    def defers(self, at: Position) -> Tensor:
        return _peak(at.draft_raw) < 1 - self.alpha

    def native_form(self) -> NativeForm:
        return NativeForm("CHOW", self.alpha)


@dataclass(frozen=True, config=STRICT)
class ChowLog(BinaryCascade):
    """Defers where the draft is unsure: entropy(q) > alpha, in nats."""

    alpha: Finite
    rule: Literal["chow_log"] = "chow_log"
    capturable = True

    def defers(self, at: Position) -> Tensor:
        return _entropy(at.draft_raw) > self.alpha

    def native_form(self) -> NativeForm:
        return NativeForm("CHOW_LOG", self.alpha)


@dataclass(frozen=True, config=STRICT)
class Diff(BinaryCascade):
    """Defers where the target is surer by more than alpha: max q < max p - alpha. Equation 5."""

    alpha: Finite
    rule: Literal["diff"] = "diff"
    capturable = True

    def defers(self, at: Position) -> Tensor:
        return _peak(at.draft_raw) < _peak(at.target_raw) - self.alpha

    def native_form(self) -> NativeForm:
        return NativeForm("DIFF", self.alpha)


@dataclass(frozen=True, config=STRICT)
class DiffLog(BinaryCascade):
    """Defers where the target is surer by more than alpha: -H(q) < -H(p) - alpha, in nats."""

    alpha: Finite
    rule: Literal["diff_log"] = "diff_log"
    capturable = True

    def defers(self, at: Position) -> Tensor:
        return -_entropy(at.draft_raw) < -_entropy(at.target_raw) - self.alpha

    def native_form(self) -> NativeForm:
        return NativeForm("DIFF_LOG", self.alpha)


@dataclass(frozen=True, config=STRICT)
class Opt(BinaryCascade):
    """`Diff`, with alpha weighed by what a deferral costs: max q < max p - alpha TVD(p, q).

    TVD is that of the distributions tokens are drawn from; at temperature 0 it is 0 or 1, and the
    rule makes the same texts as `Diff` (lemma 8). Equation 10, the plug-in of the optimal rule.
    """

    alpha: Finite
    rule: Literal["opt"] = "opt"
    capturable = True

    def defers(self, at: Position) -> Tensor:
        margin = self.alpha * total_variation(at.target, at.draft)[..., None]
        return _peak(at.draft_raw) < _peak(at.target_raw) - margin

    def native_form(self) -> NativeForm:
        return NativeForm("OPT", self.alpha)


@dataclass(frozen=True, config=STRICT)
class OptLog(BinaryCascade):
    """`DiffLog`, with alpha weighed by what a deferral costs: -H(q) < -H(p) - alpha TVD(p, q)."""

    alpha: Finite
    rule: Literal["opt_log"] = "opt_log"
    capturable = True

    def defers(self, at: Position) -> Tensor:
        margin = self.alpha * total_variation(at.target, at.draft)[..., None]
        return -_entropy(at.draft_raw) < -_entropy(at.target_raw) - margin

    def native_form(self) -> NativeForm:
        return NativeForm("OPT_LOG", self.alpha)


@dataclass(frozen=True, config=STRICT)
class TokenV1(Cascade):
    """Gives up token v of the draft's where q(v) < max p - alpha. Equations 11 and 13."""

    alpha: Finite
    rule: Literal["token_v1"] = "token_v1"
    capturable = True

    def defers(self, at: Position) -> Tensor:
        return at.draft_raw < _peak(at.target_raw) - self.alpha

    def native_form(self) -> NativeForm:
        return NativeForm("TOKEN_V1", self.alpha)


@dataclass(frozen=True, config=STRICT)
class TokenV2(Cascade):
    """Gives up token v of the draft's where p(v) < max p - alpha. Equations 11 and 14."""

    alpha: Finite
    rule: Literal["token_v2"] = "token_v2"
    capturable = True

    def defers(self, at: Position) -> Tensor:
        return at.target_raw < _peak(at.target_raw) - self.alpha

    def native_form(self) -> NativeForm:
        return NativeForm("TOKEN_V2", self.alpha)


@dataclass(frozen=True, config=STRICT)
class TokenV3(Cascade):
    """Gives up token v of the draft's where p(v) < (1 - alpha) max p. Equations 11 and 15."""

    alpha: Share
    rule: Literal["token_v3"] = "token_v3"
    capturable = True

    def defers(self, at: Position) -> Tensor:
        return at.target_raw < (1 - self.alpha) * _peak(at.target_raw)

    def native_form(self) -> NativeForm:
        return NativeForm("TOKEN_V3", self.alpha)


def _peak(probs: Tensor) -> Tensor:
    return probs.amax(-1, keepdim=True)


def _entropy(probs: Tensor) -> Tensor:
    return -torch.xlogy(probs, probs).sum(-1, keepdim=True)
