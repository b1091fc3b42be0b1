"""Rows of tokens to tensors: the one place where labels are shifted and masks are made.

Masks go by position, never by token: where padding and end of text are the same token (SmolLM2), a
mask by token would silence the label that teaches a draft to stop.
"""

# B batch, T positions
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

_PADDING = 0  # any token does: padding stands on the right, where no real position can see it


@dataclass(frozen=True, slots=True)
class Row:
    """A text to train on; tokens before `trained_from` are context and carry no loss.

    `target_hidden_TD` are the target's hidden states before each trained token, where they are known
    already because the target wrote the text.
    """

    tokens: Sequence[int]
    trained_from: int
    target_hidden_TD: Tensor | None = None

    def __post_init__(self) -> None:
        # The first token has nothing before it that could predict it.
        assert 1 <= self.trained_from < len(self.tokens), "a row needs context and a trained token"


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """What models read and what they should have said.

    Position t of a row reads tokens[t] and predicts labels[t], the token after it.

    Attributes:
        tokens_BT: Padded on the right.
        attention_BT: 1 = token, 0 = padding; None where no row is padded.
        labels_BT: The next token at each position.
        mask_BT: 1 = the label at this position is trained.
    """

    tokens_BT: Tensor
    attention_BT: Tensor | None
    labels_BT: Tensor
    mask_BT: Tensor

    def to(self, device: torch.device) -> TokenBatch:
        attention = None if self.attention_BT is None else self.attention_BT.to(device)
        return TokenBatch(
            self.tokens_BT.to(device),
            attention,
            self.labels_BT.to(device),
            self.mask_BT.to(device),
        )


def collate(rows: Sequence[Row]) -> TokenBatch:
    """Pad rows on the right and shift their labels.

    Tokens a b c d with c the first trained one become (a b c), labels (b c d), mask (0 1 1): the
    last token is read by nobody, so it is a label only.
    """
    width = max(len(row.tokens) for row in rows) - 1
    tokens_BT = torch.full((len(rows), width), _PADDING, dtype=torch.int64)
    labels_BT = torch.full_like(tokens_BT, _PADDING)
    attention_BT = torch.zeros(len(rows), width, dtype=torch.int64)
    mask_BT = torch.zeros(len(rows), width, dtype=torch.bool)
    for index, row in enumerate(rows):
        length = len(row.tokens) - 1
        tokens = torch.tensor(list(row.tokens))
        tokens_BT[index, :length] = tokens[:-1]
        labels_BT[index, :length] = tokens[1:]
        attention_BT[index, :length] = 1
        mask_BT[index, row.trained_from - 1 : length] = True
    padded = not bool(attention_BT.all())
    return TokenBatch(tokens_BT, attention_BT if padded else None, labels_BT, mask_BT)
