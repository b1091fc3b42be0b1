"""Draft policies: how many tokens a block drafts, at most gamma.

A policy depends only on values known before the token is drawn, so lossless rules stay lossless.
Custom policies derive from `DraftPolicy`: see docs/guides/add_a_policy.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

from pydantic import Field
from pydantic.dataclasses import dataclass

from paceline.core.rule_base import STRICT
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


AnyPolicy: TypeAlias = FixedLength | Confident

if TYPE_CHECKING:
    PolicyChoice: TypeAlias = DraftPolicy
else:
    PolicyChoice = variants(AnyPolicy, "policy", DraftPolicy)
    """Configuration field: a built-in policy, or `{import: package.module:Name, ...}`."""
