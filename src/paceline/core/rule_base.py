"""Interface of acceptance rules, and the distribution that a rule induces.

A rule maps p (target) and q (draft) to three vectors over the vocabulary: acceptance a(v), residual
r(v), and the induced distribution q a + (1 - sum q a) r of the next token. A rule that states a
distribution pi accepts with min(1, pi/q), recovers from norm((pi - q)_+) and induces pi.

To add a rule, derive a frozen pydantic dataclass from `Rule`: see docs/guides/add_a_rule.md.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import torch
from pydantic import ConfigDict
from torch import Tensor

from paceline.strict_models import RaisesConfigErrors

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline.core.sampling import SamplingParams

Bonus: TypeAlias = Literal["rule", "target"]
"""What the bonus token and the first token of a text follow."""

STRICT = ConfigDict(extra="forbid")


class Position(NamedTuple):
    """Probabilities of both models at one or many positions, [..., V] each.

    Tokens are drawn from `target` and `draft`. Confidences use `target_raw` and `draft_raw`, the
    untempered distributions.
    """

    target: Tensor
    draft: Tensor
    target_raw: Tensor
    draft_raw: Tensor

    @classmethod
    def of(
        cls,
        target: Tensor,
        draft: Tensor,
        target_raw: Tensor | None = None,
        draft_raw: Tensor | None = None,
    ) -> Position:
        """Build a position; raw distributions default to the tempered ones."""
        return cls(
            target,
            draft,
            target if target_raw is None else target_raw,
            draft if draft_raw is None else draft_raw,
        )

    def each(self, select: Callable[[Tensor], Tensor]) -> Position:
        """The position with a part of each distribution; raw ones that are equal stay the same."""
        target, draft = select(self.target), select(self.draft)
        target_raw = None if self.target_raw is self.target else select(self.target_raw)
        draft_raw = None if self.draft_raw is self.draft else select(self.draft_raw)
        return Position.of(target, draft, target_raw, draft_raw)

    def of_tokens(self, tokens: Tensor) -> Position:
        """The probabilities of these tokens, [..., V] -> [..., K]."""
        return self.each(lambda probs: probs.gather(-1, tokens))


class Rule(metaclass=RaisesConfigErrors):
    """Base class of acceptance rules.

    Attributes:
        exact: The induced distribution is p.
        needs_draft_at_bonus: The bonus token follows pi, so q after the last token is needed.
        uses_confidence: The rule reads untempered distributions at every temperature.
        entrywise: Acceptance of v depends on p(v) and q(v) only, if `reads_raw` is False.
        capturable: Control flow does not depend on values, so that CUDA graphs can capture it.
        definition: What it does, in pages; empty: the first line of the docstring.
        grid: Arguments of the settings that `analyze` and `tune` compare by default.
    """

    exact: bool = False
    needs_draft_at_bonus: bool = False
    uses_confidence: bool = False
    entrywise: bool = False
    capturable: bool = False
    definition: str = ""
    grid: Sequence[tuple[Any, ...]] = ()

    @property
    def name(self) -> str:
        """The tag in configurations, or the class name."""
        return getattr(self, "rule", type(self).__name__)

    @property
    def num_undrafted(self) -> int:
        """Number of tokens at the start of a text that are not drafted; metrics skip them.

        Under an exact rule and `TargetBonus`, the target's prefill generates the first token.
        """
        return 1 if self.exact else 0

    def reads_raw(self, sampling: SamplingParams) -> bool:
        """True if the rule reads untempered distributions, and they differ from the sampled ones.

        Rules without `uses_confidence` get them only if this is True.
        """
        return self.uses_confidence and not sampling.untempered

    @abstractmethod
    def accept_at(self, at: Position) -> Tensor:
        """Acceptance probability of each token, [..., V]; V may be a subset for entrywise rules."""

    @abstractmethod
    def residual_at(self, at: Position) -> Tensor:
        """Distribution of the token that replaces a rejected one, [..., V]; sums to 1."""

    def pi_at(self, at: Position) -> Tensor | None:
        """The distribution pi that the rule states, [..., V]; None if it states none."""
        return None

    def induced_at(self, at: Position) -> Tensor:
        """Distribution of a token at a drafted position: q a + (1 - sum q a) r, [..., V]."""
        accepted = at.draft * self.accept_at(at)
        rejected = (1 - accepted.sum(-1, keepdim=True)).clamp(min=0)
        return accepted + rejected * self.residual_at(at)

    def accept_tokens_at(self, at: Position, tokens: Tensor) -> Tensor:
        """`accept_at` of these tokens only, [..., K] -> [..., K]."""
        if self.entrywise and at.target_raw is at.target:
            return self.accept_at(at.of_tokens(tokens))
        return self.accept_at(at).gather(-1, tokens)


@dataclass(frozen=True)
class TargetBonus(Rule):
    """A rule at drafted positions; the first and the bonus token follow the target, as in vLLM.

    Without q behind the last draft, no rule can be applied there.
    """

    drafted: Rule

    @property
    def name(self) -> str:
        return self.drafted.name

    @property
    def num_undrafted(self) -> int:
        return 1

    @property
    def uses_confidence(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.drafted.uses_confidence

    @property
    def entrywise(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.drafted.entrywise

    @property
    def capturable(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return is_capturable(self.drafted)

    def reads_raw(self, sampling: SamplingParams) -> bool:
        return self.drafted.reads_raw(sampling)

    def accept_at(self, at: Position) -> Tensor:
        return self.drafted.accept_at(at)

    def accept_tokens_at(self, at: Position, tokens: Tensor) -> Tensor:
        return self.drafted.accept_tokens_at(at, tokens)

    def residual_at(self, at: Position) -> Tensor:
        return self.drafted.residual_at(at)


def name_of(kind: type[Rule]) -> str:
    """`Rule.name` of the rules of a class."""
    return getattr(kind, "rule", kind.__name__)


def with_bonus(rule: Rule, bonus: Bonus) -> Rule:
    """The rule with this bonus; an exact rule already follows the target everywhere."""
    return rule if bonus == "rule" or rule.exact else TargetBonus(rule)


def as_read(rule: Rule, at: Position, sampling: SamplingParams) -> Position:
    """The distributions that the decoder gives to the rule: see `Rule.reads_raw`."""
    reads = rule.uses_confidence or rule.reads_raw(sampling)
    return at if reads else Position.of(at.target, at.draft)


def is_capturable(rule: Rule) -> bool:
    """True if the rule's own class, not a base class, sets `capturable`."""
    return "capturable" in vars(type(rule)) and rule.capturable


def capped_ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """min(1, numerator / denominator); 1 where the denominator is 0 (never drawn)."""
    ratio = numerator / torch.where(denominator > 0, denominator, 1.0)
    return torch.where(denominator > 0, ratio.clamp(max=1), 1.0)


def normalised_excess(target: Tensor, draft: Tensor, *, fallback: Tensor) -> Tensor:
    """norm((target - draft)_+), or the fallback where the excess is 0 everywhere."""
    excess = (target - draft).clamp(min=0)
    mass = excess.sum(-1, keepdim=True)
    has_excess = mass > 0
    normalised = excess / torch.where(has_excess, mass, 1.0)
    # The last line is rarely needed. On other devices than the CPU this test forces a sync.
    if has_excess.device.type == "cpu" and has_excess.all():
        return normalised
    return torch.where(has_excess, normalised, fallback)
