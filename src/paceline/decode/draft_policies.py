"""Draft policies: how many tokens a block drafts, at most gamma.

A policy depends only on values known before the token is drawn, so lossless rules stay lossless.
Custom policies derive from `DraftPolicy`: see docs/guides/add_a_policy.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

from pydantic import Field
from pydantic.dataclasses import dataclass

from paceline.core.rule_base import STRICT
from paceline.core.speed import best_gamma
from paceline.extensions import variants


class DraftPolicy:
    """Base class: always drafts gamma tokens."""

    @property
    def stops_early(self) -> bool:
        """Whether the class has a `goes_on` of its own; each token then takes a draft call."""
        return type(self).goes_on is not DraftPolicy.goes_on

    @property
    def name(self) -> str:
        """The policy's tag in configurations, or its class name."""
        return getattr(self, "policy", type(self).__name__)

    def length(self, num_accepted: int, num_examined: int, most: int) -> int:
        """Tokens to draft, 0 to `most`, given the counts of this text so far."""
        return most

    def goes_on(self, confidence: float) -> bool:
        """True to draft the next token, given the untempered max q at its position."""
        return True


@dataclass(frozen=True, config=STRICT)
class FixedLength(DraftPolicy):
    """Always drafts gamma tokens."""

    policy: Literal["fixed"] = "fixed"


@dataclass(frozen=True, config=STRICT)
class Confident(DraftPolicy):
    """Stops at the first position where max q < threshold, q untempered.

    Paper: Kim et al. 2023, the fallback policy of BiLD, as in Narasimhan et al. 2024, section E.5,
    where the threshold is 1 - alpha_f.
    """

    threshold: Annotated[float, Field(ge=0, le=1)]
    policy: Literal["confident"] = "confident"

    def goes_on(self, confidence: float) -> bool:
        return confidence >= self.threshold


@dataclass(frozen=True, config=STRICT)
class Adaptive(DraftPolicy):
    """Drafts the number of tokens that is fastest at this text's acceptance rate so far.

    Estimates acceptance as (prior_tokens x prior + accepted) / (prior_tokens + examined), and
    maximizes tau / (c gamma + 1), where c is the cost ratio. Drafts at least one token, so that the
    estimate keeps being updated. Paper: ours.
    """

    cost_ratio: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    prior: Annotated[float, Field(ge=0, le=1)] = 0.7
    prior_tokens: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 8.0
    policy: Literal["adaptive"] = "adaptive"

    def length(self, num_accepted: int, num_examined: int, most: int) -> int:
        accepted = self.prior_tokens * self.prior + num_accepted
        acceptance = accepted / (self.prior_tokens + num_examined)
        return max(1, best_gamma(acceptance, self.cost_ratio, most))


AnyPolicy: TypeAlias = FixedLength | Confident | Adaptive

if TYPE_CHECKING:
    PolicyChoice: TypeAlias = DraftPolicy
else:
    PolicyChoice = variants(AnyPolicy, "policy", DraftPolicy)
    """Configuration field: a built-in policy, or `{import: package.module:Name, ...}`."""
