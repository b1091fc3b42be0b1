"""Tensors of a drafted block: drafted tokens, random numbers and the verdict.

Shape suffixes: B batch, G gamma, P positions of the draft (G, or one more), V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Drafted(NamedTuple):
    """Drafted tokens and their distributions.

    Attributes:
        tokens_BG: The tokens.
        probs_BPV: The distributions they were drawn from; None after greedy drafting. P is G, or
            G + 1 with the distribution after the last token.
        raw_BPV: Untempered distributions; None if not requested or equal to `probs_BPV`.
    """

    tokens_BG: Tensor
    probs_BPV: Tensor | None
    raw_BPV: Tensor | None = None

    def to(self, device: torch.device) -> Drafted:
        """Move to a device."""
        tokens_BG, *rest = self
        return Drafted(
            tokens_BG.to(device), *(None if part is None else part.to(device) for part in rest)
        )


class Uniforms(NamedTuple):
    """Numbers in [0, 1): one per drafted token, and one per row for the token after the block."""

    accept_BG: Tensor
    next_B: Tensor

    def to(self, device: torch.device) -> Uniforms:
        """Move to a device."""
        return Uniforms(self.accept_BG.to(device), self.next_B.to(device))


class Verdict(NamedTuple):
    """Per row: number of accepted tokens, the token after them, and whether it is a bonus token."""

    num_accepted_B: Tensor
    next_tokens_B: Tensor
    is_bonus_B: Tensor
