"""Collates rows of tokens into padded tensors, shifts the labels and builds the masks.

Masks depend on position, never on token ids. Some models (SmolLM2) use one token for padding and
end of text; masking by id would drop the label that teaches the draft to stop.
"""

# B batch, T positions
from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.core.top_k_tail import TopScores
from paceline.models.contract import Texts, pad

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


@dataclass(frozen=True, slots=True)
class TokenRow:
    """A training text; tokens before `trained_from` are context and carry no loss.

    Attributes:
        tokens: Tokens of the decoder.
        trained_from: Index of the first token with loss; the number of tokens if a text has none,
            such as a prompt without a completion.
        target_hidden_TD: The target's hidden states that predict each trained token, or None.
        source: Encoder input of an encoder-decoder; None for a decoder-only model.
        top: The target's most likely tokens before each trained token; None: not recorded.
        prompt_length: Number of leading tokens used as the prompt for on-policy generation.
        where: Source location, for error messages.
    """

    tokens: Sequence[int]
    trained_from: int
    target_hidden_TD: Tensor | None = None
    source: Sequence[int] | None = None
    top: TopScores | None = None
    prompt_length: int = 0
    where: str = ""

    @property
    def prompt(self) -> list[int]:
        """The model's input."""
        return list(self.tokens[: self.prompt_length] if self.source is None else self.source)


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Model inputs and labels; the prediction at position t is for labels[t], the next token.

    Attributes:
        tokens_BT: Input ids, padded on the right.
        attention_BT: 1 = token, 0 = padding; None if no row is padded.
        labels_BT: The next token at each position.
        mask_BT: 1 = the label at this position carries loss.
        source: Encoder inputs; None for a decoder-only model.
        top: The target's most likely tokens at the positions of the mask, in order; None if a row
            has none.
    """

    tokens_BT: Tensor
    attention_BT: Tensor | None
    labels_BT: Tensor
    mask_BT: Tensor
    source: Texts | None = None
    top: TopScores | None = None

    def scored(self) -> TokenBatch:
        """The batch without loss at positions for which no scores of the target were recorded."""
        if self.top is None:
            return self
        known_N = self.top.recorded()
        mask_BT = self.mask_BT.masked_scatter(self.mask_BT, known_N)
        top = TopScores(*(values[known_N] for values in self.top))
        return dataclasses.replace(self, mask_BT=mask_BT, top=top)

    def to(self, device: torch.device) -> TokenBatch:
        attention = None if self.attention_BT is None else self.attention_BT.to(device)
        labels, mask = self.labels_BT.to(device), self.mask_BT.to(device)
        source = None if self.source is None else self.source.to(device)
        top = None if self.top is None else self.top.to(device)
        return TokenBatch(self.tokens_BT.to(device), attention, labels, mask, source, top)


def collate(rows: Sequence[TokenRow]) -> TokenBatch:
    """Pad rows on the right and shift their labels.

    Tokens a b c d, with c the first trained token, become inputs (a b c), labels (b c d) and mask
    (0 1 1). The last token is only a label.
    """
    for row in rows:
        assert 1 <= row.trained_from < len(row.tokens), "a row needs context and a trained token"
    inputs, labels = pad([row.tokens[:-1] for row in rows]), pad([row.tokens[1:] for row in rows])
    places_T = torch.arange(inputs.tokens_BT.shape[1])
    first_B, end_B = torch.tensor([[row.trained_from, len(row.tokens)] for row in rows]).T - 1
    mask_BT = (places_T >= first_B[:, None]) & (places_T < end_B[:, None])
    sources = [row.source for row in rows if row.source is not None]
    assert len(sources) in (0, len(rows)), "all rows have a source, or none"
    source = pad(sources) if sources else None
    return TokenBatch(*inputs[:2], labels.tokens_BT, mask_BT, source, _joined(rows))


def _joined(rows: Sequence[TokenRow]) -> TopScores | None:
    """Scores of all rows, of equal width."""
    found = [row.top for row in rows if row.top is not None]
    if len(found) < len(rows):
        return None
    width = max(top.tokens_NK.shape[1] for top in found)
    tokens, log_probs = (
        torch.cat([F.pad(values, (0, width - values.shape[1]), value=fill) for values in parts])
        for parts, fill in zip(zip(*found, strict=True), (-1, 0.0), strict=True)
    )
    return TopScores(tokens.long(), log_probs)


_MAX_PADDED_RATIO = 2  # positions of a padded batch / real tokens in it


def batches_of_like_length(
    lengths: Sequence[int], most_rows: int, added: Sequence[int] = (), limit: int | None = None
) -> Iterator[list[int]]:
    """Yield the row indices of each batch, shortest rows first; each row appears once.

    Args:
        lengths: Number of tokens of each row, padded to the longest in the batch.
        most_rows: Maximum number of rows in a batch.
        added: Number of tokens appended to each row, padded separately; empty for none.
        limit: Maximum padded length, `added` included, of a batch of several rows; None: no limit.
    """

    def fits(rows: list[int]) -> bool:
        longest = max(lengths[row] for row in rows)
        appended = max(added[row] for row in rows) if added else 0
        short_enough = limit is None or longest + appended <= limit
        num_tokens = sum(lengths[row] for row in rows)
        little_padding = len(rows) * longest <= _MAX_PADDED_RATIO * num_tokens
        return len(rows) <= most_rows and short_enough and little_padding

    rows: list[int] = []
    for row in sorted(range(len(lengths)), key=lengths.__getitem__):
        if rows and not fits([*rows, row]):
            yield rows
            rows = []
        rows.append(row)
    if rows:
        yield rows
