"""How many tokens a block drafts, at most gamma.

Whatever a policy looks at is known before the token in question is drawn, so a lossless rule stays
lossless under each. A policy of your own derives from `DraftPolicy`: see docs/guides/add_a_policy.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

from pydantic import Field
from pydantic.dataclasses import dataclass

from paceline.core.rule_base import STRICT
from paceline.core.speed import best_gamma
from paceline.extensions import variants


class DraftPolicy:
    """Always gamma tokens; derived classes say otherwise.

    Attributes:
        stops_early: Ask `goes_on` before each drafted token, which then takes a pass of its own.
    """

    stops_early: bool = False

    @property
    def name(self) -> str:
        """Its tag in configurations, or its class."""
        return getattr(self, "policy", type(self).__name__)

    def length(self, num_accepted: int, num_examined: int, most: int) -> int:
        """Tokens to draft, 1 to `most`, after so many accepted of so many examined in this text."""
        return most

    def goes_on(self, confidence: float) -> bool:
        """Whether to draft the next token, given max q before it, untempered."""
        return True


@dataclass(frozen=True, config=STRICT)
class FixedLength(DraftPolicy):
    """Always gamma."""

    policy: Literal["fixed"] = "fixed"


@dataclass(frozen=True, config=STRICT)
class Confident(DraftPolicy):
    """Stop before a position where the draft is unsure: max q < threshold, q untempered.

    Paper: Kim et al. 2023, the fallback policy of BiLD, as in Narasimhan et al. 2024, section E.5,
    where it is 1 - alpha_f.
    """

    threshold: Annotated[float, Field(ge=0, le=1)]
    policy: Literal["confident"] = "confident"
    stops_early = True

    def goes_on(self, confidence: float) -> bool:
        return confidence >= self.threshold


@dataclass(frozen=True, config=STRICT)
class Adaptive(DraftPolicy):
    """As many as pay best at the acceptance that this text has had so far.

    Acceptance is estimated as (prior_tokens x prior + accepted) / (prior_tokens + examined), and the
    block length is that of the largest tau / (c gamma + 1), c the cost ratio; at least one token, or
    nothing more would be learnt. Paper: ours.
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
    """A field of a configuration: a built-in policy, or `{import: package.module:Name, ...}`."""
