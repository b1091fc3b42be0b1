"""What every rule is: how a drafted token is kept, and the distribution that the text then follows.

A rule is pure mathematics on p (target) and q (draft), both [..., V] probabilities. It is three
vectors: acceptance a(v), residual r(v), and the induced distribution q a + (1 - sum q a) r, which is
exact for one step. A rule that states its aim pi keeps min(1, pi/q) and recovers from
norm((pi - q)_+), so that it induces pi itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from pydantic import ConfigDict
from torch import Tensor

STRICT = ConfigDict(extra="forbid")


class Rule(ABC):
    """What verification needs to know.

    Attributes:
        exact: The induced distribution is p itself.
        needs_draft_at_bonus: The bonus token follows pi, which needs q behind the last drafted token.
        uses_confidence: Looks at untempered distributions, too.
        entrywise: Whether v is kept hangs on p(v) and q(v) alone.
    """

    exact: bool = False
    needs_draft_at_bonus: bool = False
    uses_confidence: bool = False
    entrywise: bool = False

    @property
    def num_undrafted(self) -> int:
        """Tokens at the start of a text that no block drafts.

        Under an exact rule the first token is the target's own, from its pass over the prompt. Under
        the others it is drafted and judged like every token. Figures of drafted positions leave out
        this many positions; nothing else decides that.
        """
        return 1 if self.exact else 0

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

        An entrywise rule may be given few entries of p and q. `*_raw` are untempered distributions,
        for confidences; None: p and q are.
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
