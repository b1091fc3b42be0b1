"""A drafted block as tensors: what was drafted, the numbers that decide, and the verdict.

Shape suffixes: B batch, G gamma, P positions of the draft (G, or one more), V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Drafted(NamedTuple):
    """Drafted tokens, and what they were drawn from.

    Attributes:
        tokens_BG: The tokens.
        probs_BPV: Their distributions; None where only the likeliest tokens counted. P is G, or
            G + 1 where the distribution after the last token was asked for.
        raw_BPV: Untempered distributions, where asked for and not the same; else None.
    """

    tokens_BG: Tensor
    probs_BPV: Tensor | None
    raw_BPV: Tensor | None = None

    def to(self, device: torch.device) -> Drafted:
        """The same on this device."""
        tokens_BG, *rest = self
        return Drafted(
            tokens_BG.to(device), *(None if part is None else part.to(device) for part in rest)
        )


class Uniforms(NamedTuple):
    """Numbers in [0, 1): one for each drafted token [B, G], and one for the token that follows [B]."""

    accept_BG: Tensor
    next_B: Tensor

    def to(self, device: torch.device) -> Uniforms:
        """The same on this device."""
        return Uniforms(self.accept_BG.to(device), self.next_B.to(device))


class Verdict(NamedTuple):
    """Per row: drafted tokens kept, the token that follows them, and whether it is a bonus."""

    num_accepted_B: Tensor
    next_tokens_B: Tensor
    is_bonus_B: Tensor
