"""What every rule is: how a drafted token is kept, and the distribution that the text then follows.

A rule is pure mathematics on p (target) and q (draft). It is three vectors over the vocabulary:
acceptance a(v), residual r(v), and the induced distribution q a + (1 - sum q a) r, which is exact
for one step. A rule that states its aim pi keeps min(1, pi/q) and recovers from norm((pi - q)_+), so
that it induces pi itself.

A rule of your own is a frozen pydantic dataclass that derives from `Rule`, with `accept` and
`recover`, and `aim` if it states one: see docs/guides/add_a_rule.md.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from pydantic import ConfigDict
from torch import Tensor

STRICT = ConfigDict(extra="forbid")


class Position(NamedTuple):
    """The distributions of both models at one position, or at many: probabilities, [..., V] each.

    `target` and `draft` are what tokens are drawn from; `target_raw` and `draft_raw` are the same
    untempered, for confidences.
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
        """Raw distributions that are None are the same as the others."""
        return cls(
            target,
            draft,
            target if target_raw is None else target_raw,
            draft if draft_raw is None else draft_raw,
        )


class NativeForm(NamedTuple):
    """How native/rules.c knows a rule: the name of its kind, and its parameters."""

    kind: str
    alpha: float = 0.0
    beta: float = 0.0


class Rule(ABC):
    """What verification needs to know.

    Attributes:
        exact: The induced distribution is p itself.
        needs_draft_at_bonus: The bonus token follows pi, which needs q after the last drafted token.
        uses_confidence: Reads untempered distributions, too.
        entrywise: Whether v is kept depends on p(v) and q(v) alone.
        capturable: Control flow is independent of the data, so that a CUDA graph can be captured.
    """

    exact: bool = False
    needs_draft_at_bonus: bool = False
    uses_confidence: bool = False
    entrywise: bool = False
    capturable: bool = False

    @property
    def name(self) -> str:
        """Its tag in configurations, or its class."""
        return getattr(self, "rule", type(self).__name__)

    @property
    def num_undrafted(self) -> int:
        """Tokens at the start of a text that no block drafts.

        Under an exact rule the first token is the target's own, from its pass over the prompt. Under
        the others it is drafted and judged like every token. Figures of drafted positions leave out
        this many positions; nothing else decides that.
        """
        return 1 if self.exact else 0

    @abstractmethod
    def accept(self, at: Position) -> Tensor:
        """Probability that a drafted token v is kept, [..., V].

        An entrywise rule may be given few entries of each distribution.
        """

    @abstractmethod
    def recover(self, at: Position) -> Tensor:
        """Distribution of the token that replaces a rejected one, [..., V], sums to 1."""

    def aim(self, at: Position) -> Tensor | None:
        """The distribution pi that the rule states as its aim, [..., V]; None where it states none."""
        return None

    def native_form(self) -> NativeForm | None:
        """This rule in C; None: it is computed by PyTorch.

        What a class declares does not hold for classes derived from it: they may compute something else.
        """
        return None

    def accept_probs(
        self,
        target_probs: Tensor,
        draft_probs: Tensor,
        *,
        target_raw: Tensor | None = None,
        draft_raw: Tensor | None = None,
    ) -> Tensor:
        """`accept`. Shapes: probabilities [..., V] -> [..., V]; `*_raw` None: not tempered."""
        return self.accept(Position.of(target_probs, draft_probs, target_raw, draft_raw))

    def residual(
        self,
        target_probs: Tensor,
        draft_probs: Tensor,
        *,
        target_raw: Tensor | None = None,
        draft_raw: Tensor | None = None,
    ) -> Tensor:
        """`recover`. Shapes as in `accept_probs`."""
        return self.recover(Position.of(target_probs, draft_probs, target_raw, draft_raw))

    def pi(
        self,
        target_probs: Tensor,
        draft_probs: Tensor,
        *,
        target_raw: Tensor | None = None,
        draft_raw: Tensor | None = None,
    ) -> Tensor | None:
        """`aim`. Shapes as in `accept_probs`."""
        return self.aim(Position.of(target_probs, draft_probs, target_raw, draft_raw))

    def induced_distribution(
        self,
        target_probs: Tensor,
        draft_probs: Tensor,
        *,
        target_raw: Tensor | None = None,
        draft_raw: Tensor | None = None,
    ) -> Tensor:
        """`induced`. Shapes as in `accept_probs`."""
        return self.induced(Position.of(target_probs, draft_probs, target_raw, draft_raw))

    def induced(self, at: Position) -> Tensor:
        """q a + (1 - sum q a) r: what a token at a drafted position follows, [..., V]."""
        kept = at.draft * self.accept(at)
        rejected = (1 - kept.sum(-1, keepdim=True)).clamp(min=0)
        return kept + rejected * self.recover(at)


def is_capturable(rule: Rule) -> bool:
    """Does the rule's own class declare that its control flow is independent of the data?"""
    return "capturable" in vars(type(rule)) and rule.capturable


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
    # rarely needed, and a pass over the whole vocabulary; to ask another device would make it wait
    if has_excess.device.type == "cpu" and has_excess.all():
        return normalised
    return torch.where(has_excess, normalised, fallback)
