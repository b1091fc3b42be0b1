"""How a drafted token is kept, and the distribution that the text then follows.

A rule is pure mathematics on p (target) and q (draft), both [..., V] probabilities. Every rule is
three vectors: acceptance a(v), residual r(v), and the induced distribution
q a + (1 - sum q a) r, which is exact for one step. Choices are frozen and tagged by `rule`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal, TypeAlias

import torch
from pydantic import ConfigDict, Field, model_validator
from pydantic.dataclasses import dataclass
from torch import Tensor

_STRICT = ConfigDict(extra="forbid")


class Rule(ABC):
    """What verification needs to know. `exact`: the induced distribution is p itself."""

    exact: bool = False

    @abstractmethod
    def accept_probs(
        self,
        target_probs: Tensor,
        draft_probs: Tensor,
        *,
        target_raw: Tensor | None = None,
        draft_raw: Tensor | None = None,
    ) -> Tensor:
        """Probability that a drafted token v is kept, [..., V].

        The rules here look at p(v) and q(v) of the drafted token alone, so a caller that needs few
        entries may pass just those. `*_raw` are untempered distributions, for confidences.
        """

    @abstractmethod
    def residual(
        self,
        target_probs: Tensor,
        draft_probs: Tensor,
        *,
        target_raw: Tensor | None = None,
        draft_raw: Tensor | None = None,
    ) -> Tensor:
        """Distribution of the token that replaces a rejected one, [..., V], sums to 1."""

    def pi(
        self,
        target_probs: Tensor,
        draft_probs: Tensor,
        *,
        target_raw: Tensor | None = None,
        draft_raw: Tensor | None = None,
    ) -> Tensor | None:
        """The distribution that the rule states as its aim; None where it states none."""
        return None

    def induced_distribution(
        self,
        target_probs: Tensor,
        draft_probs: Tensor,
        *,
        target_raw: Tensor | None = None,
        draft_raw: Tensor | None = None,
    ) -> Tensor:
        """q a + (1 - sum q a) r: what a token at a drafted position really follows, [..., V]."""
        raw = {"target_raw": target_raw, "draft_raw": draft_raw}
        kept = draft_probs * self.accept_probs(target_probs, draft_probs, **raw)
        rejected = (1 - kept.sum(-1, keepdim=True)).clamp(min=0)
        return kept + rejected * self.residual(target_probs, draft_probs, **raw)


@dataclass(frozen=True, config=_STRICT)
class Lossless(Rule):
    """Accept min(1, p/q), recover from norm((p - q)_+): the text follows p.

    Paper: Zhou et al. 2023, section 3 and algorithm A.1.
    """

    rule: Literal["lossless"] = "lossless"
    exact = True

    def accept_probs(
        self,
        target_probs: Tensor,
        draft_probs: Tensor,
        *,
        target_raw: Tensor | None = None,
        draft_raw: Tensor | None = None,
    ) -> Tensor:
        return capped_ratio(target_probs, draft_probs)

    def residual(
        self,
        target_probs: Tensor,
        draft_probs: Tensor,
        *,
        target_raw: Tensor | None = None,
        draft_raw: Tensor | None = None,
    ) -> Tensor:
        return normalised_excess(target_probs, draft_probs, fallback=target_probs)

    def pi(
        self,
        target_probs: Tensor,
        draft_probs: Tensor,
        *,
        target_raw: Tensor | None = None,
        draft_raw: Tensor | None = None,
    ) -> Tensor:
        return target_probs


@dataclass(frozen=True, config=_STRICT)
class Lenient(Rule):
    """Accept min(1, f(p)/q), recover from norm((p - q)_+).

    f is p/epsilon (linear), p/epsilon^2 (square) or p^epsilon (exponential); epsilon 1 is lossless.
    Paper: Zhou et al. 2023, section 4 (lossy) and algorithm A.1.
    """

    kind: Literal["linear", "square", "exponential"] = "linear"
    epsilon: float = Field(default=1.0, gt=0, le=1)
    rule: Literal["lenient"] = "lenient"

    def accept_probs(
        self,
        target_probs: Tensor,
        draft_probs: Tensor,
        *,
        target_raw: Tensor | None = None,
        draft_raw: Tensor | None = None,
    ) -> Tensor:
        match self.kind:
            case "linear":
                relaxed = target_probs / self.epsilon
            case "square":
                relaxed = target_probs / self.epsilon**2
            case "exponential":
                relaxed = target_probs**self.epsilon
        return capped_ratio(relaxed, draft_probs)

    def residual(
        self,
        target_probs: Tensor,
        draft_probs: Tensor,
        *,
        target_raw: Tensor | None = None,
        draft_raw: Tensor | None = None,
    ) -> Tensor:
        return normalised_excess(target_probs, draft_probs, fallback=target_probs)


@dataclass(frozen=True, config=_STRICT)
class Lossy(Rule):
    """Accept min(1, p/((1 - alpha) q)), recover from norm((p/beta - q)_+), beta >= 1 - alpha.

    beta = 1 is `Lenient("linear", 1 - alpha)`. The paper's stated aim,
    max{min{q, p/(1 - alpha)}, p/beta}, is a distribution for one beta only, so `pi` is None.
    Paper: Narasimhan et al. 2024, section 2.
    """

    alpha: float = Field(ge=0, lt=1)
    beta: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    rule: Literal["lossy"] = "lossy"

    @model_validator(mode="after")
    def _beta_recovers_no_more_than_was_rejected(self) -> Lossy:
        # 1 - 0.7 is a little above 0.3 in binary; who writes 0.3 means it.
        if self.beta < (1 - self.alpha) * (1 - 1e-9):
            raise ValueError(f"lossy beta must be at least 1 - alpha = {1 - self.alpha:g}")
        return self

    def accept_probs(
        self,
        target_probs: Tensor,
        draft_probs: Tensor,
        *,
        target_raw: Tensor | None = None,
        draft_raw: Tensor | None = None,
    ) -> Tensor:
        return capped_ratio(target_probs / (1 - self.alpha), draft_probs)

    def residual(
        self,
        target_probs: Tensor,
        draft_probs: Tensor,
        *,
        target_raw: Tensor | None = None,
        draft_raw: Tensor | None = None,
    ) -> Tensor:
        return normalised_excess(target_probs / self.beta, draft_probs, fallback=target_probs)


AnyRule: TypeAlias = Lossless | Lenient | Lossy


def capped_ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """min(1, numerator / denominator); 1 where the denominator is 0 (such a token is never drawn)."""
    ratio = numerator / torch.where(denominator > 0, denominator, 1.0)
    return torch.where(denominator > 0, ratio.clamp(max=1), 1.0)


def normalised_excess(target: Tensor, draft: Tensor, *, fallback: Tensor) -> Tensor:
    """norm((target - draft)_+); where nothing is in excess, the fallback."""
    excess = (target - draft).clamp(min=0)
    mass = excess.sum(-1, keepdim=True)
    has_excess = mass > 0
    normalised = excess / torch.where(has_excess, mass, 1.0)
    # rarely needed, and a pass over the whole vocabulary
    return normalised if has_excess.all() else torch.where(has_excess, normalised, fallback)
