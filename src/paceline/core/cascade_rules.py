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

from paceline.core.rule import STRICT, Rule, capped_ratio, normalised_excess

Finite = Annotated[float, Field(allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]


class Cascade(Rule):
    """A rule that states pi; subclasses say which tokens of the draft's are not good enough."""

    needs_draft_at_bonus = True
    uses_confidence = True

    @abstractmethod
    def defers(
        self, target: Tensor, draft: Tensor, target_raw: Tensor, draft_raw: Tensor
    ) -> Tensor:
        """Is the target asked? Bool, [..., 1] for the whole position or [..., V] for each token."""

    def pi(
        self,
        target_probs: Tensor,
        draft_probs: Tensor,
        *,
        target_raw: Tensor | None = None,
        draft_raw: Tensor | None = None,
    ) -> Tensor:
        deferred = self.defers(
            target_probs,
            draft_probs,
            target_probs if target_raw is None else target_raw,
            draft_probs if draft_raw is None else draft_raw,
        )
        if deferred.shape[-1] == 1:
            return torch.where(deferred, target_probs, draft_probs)
        given_up = torch.where(deferred, draft_probs, 0)
        return draft_probs - given_up + target_probs * given_up.sum(-1, keepdim=True)

    def accept_probs(
        self,
        target_probs: Tensor,
        draft_probs: Tensor,
        *,
        target_raw: Tensor | None = None,
        draft_raw: Tensor | None = None,
    ) -> Tensor:
        pi = self.pi(target_probs, draft_probs, target_raw=target_raw, draft_raw=draft_raw)
        return capped_ratio(pi, draft_probs)

    def residual(
        self,
        target_probs: Tensor,
        draft_probs: Tensor,
        *,
        target_raw: Tensor | None = None,
        draft_raw: Tensor | None = None,
    ) -> Tensor:
        pi = self.pi(target_probs, draft_probs, target_raw=target_raw, draft_raw=draft_raw)
        return normalised_excess(pi, draft_probs, fallback=pi)


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

    def defers(
        self, target: Tensor, draft: Tensor, target_raw: Tensor, draft_raw: Tensor
    ) -> Tensor:
        return -torch.xlogy(draft, target_raw).sum(-1, keepdim=True) > self.threshold


@dataclass(frozen=True, config=STRICT)
class Chow(BinaryCascade):
    """Defers where the draft is unsure: max q < 1 - alpha. Equation 2."""

    alpha: Share
    rule: Literal["chow"] = "chow"

    def defers(
        self, target: Tensor, draft: Tensor, target_raw: Tensor, draft_raw: Tensor
    ) -> Tensor:
        return _peak(draft_raw) < 1 - self.alpha


@dataclass(frozen=True, config=STRICT)
class ChowLog(BinaryCascade):
    """Defers where the draft is unsure: entropy(q) > alpha, in nats."""

    alpha: Finite
    rule: Literal["chow_log"] = "chow_log"

    def defers(
        self, target: Tensor, draft: Tensor, target_raw: Tensor, draft_raw: Tensor
    ) -> Tensor:
        return _entropy(draft_raw) > self.alpha


@dataclass(frozen=True, config=STRICT)
class Diff(BinaryCascade):
    """Defers where the target is surer by more than alpha: max q < max p - alpha. Equation 5."""

    alpha: Finite
    rule: Literal["diff"] = "diff"

    def defers(
        self, target: Tensor, draft: Tensor, target_raw: Tensor, draft_raw: Tensor
    ) -> Tensor:
        return _peak(draft_raw) < _peak(target_raw) - self.alpha


@dataclass(frozen=True, config=STRICT)
class DiffLog(BinaryCascade):
    """Defers where the target is surer by more than alpha: -H(q) < -H(p) - alpha, in nats."""

    alpha: Finite
    rule: Literal["diff_log"] = "diff_log"

    def defers(
        self, target: Tensor, draft: Tensor, target_raw: Tensor, draft_raw: Tensor
    ) -> Tensor:
        return -_entropy(draft_raw) < -_entropy(target_raw) - self.alpha


@dataclass(frozen=True, config=STRICT)
class Opt(BinaryCascade):
    """`Diff`, with alpha weighed by what a deferral costs: max q < max p - alpha TVD(p, q).

    TVD is that of the distributions tokens are drawn from; at temperature 0 it is 0 or 1, and the
    rule makes the same texts as `Diff` (lemma 8). Equation 10, the plug-in of the optimal rule.
    """

    alpha: Finite
    rule: Literal["opt"] = "opt"

    def defers(
        self, target: Tensor, draft: Tensor, target_raw: Tensor, draft_raw: Tensor
    ) -> Tensor:
        return _peak(draft_raw) < _peak(target_raw) - self.alpha * _tvd(target, draft)


@dataclass(frozen=True, config=STRICT)
class OptLog(BinaryCascade):
    """`DiffLog`, with alpha weighed by what a deferral costs: -H(q) < -H(p) - alpha TVD(p, q)."""

    alpha: Finite
    rule: Literal["opt_log"] = "opt_log"

    def defers(
        self, target: Tensor, draft: Tensor, target_raw: Tensor, draft_raw: Tensor
    ) -> Tensor:
        margin = self.alpha * _tvd(target, draft)
        return -_entropy(draft_raw) < -_entropy(target_raw) - margin


@dataclass(frozen=True, config=STRICT)
class TokenV1(Cascade):
    """Gives up token v of the draft's where q(v) < max p - alpha. Equations 11 and 13."""

    alpha: Finite
    rule: Literal["token_v1"] = "token_v1"

    def defers(
        self, target: Tensor, draft: Tensor, target_raw: Tensor, draft_raw: Tensor
    ) -> Tensor:
        return draft_raw < _peak(target_raw) - self.alpha


@dataclass(frozen=True, config=STRICT)
class TokenV2(Cascade):
    """Gives up token v of the draft's where p(v) < max p - alpha. Equations 11 and 14."""

    alpha: Finite
    rule: Literal["token_v2"] = "token_v2"

    def defers(
        self, target: Tensor, draft: Tensor, target_raw: Tensor, draft_raw: Tensor
    ) -> Tensor:
        return target_raw < _peak(target_raw) - self.alpha


@dataclass(frozen=True, config=STRICT)
class TokenV3(Cascade):
    """Gives up token v of the draft's where p(v) < (1 - alpha) max p. Equations 11 and 15."""

    alpha: Share
    rule: Literal["token_v3"] = "token_v3"

    def defers(
        self, target: Tensor, draft: Tensor, target_raw: Tensor, draft_raw: Tensor
    ) -> Tensor:
        return target_raw < (1 - self.alpha) * _peak(target_raw)


def _peak(probs: Tensor) -> Tensor:
    return probs.amax(-1, keepdim=True)


def _entropy(probs: Tensor) -> Tensor:
    return -torch.xlogy(probs, probs).sum(-1, keepdim=True)


def _tvd(target: Tensor, draft: Tensor) -> Tensor:
    return 0.5 * (target - draft).abs().sum(-1, keepdim=True)
