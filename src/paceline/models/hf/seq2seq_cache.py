"""What the decoder of an encoder-decoder attends to: its own tokens, and the encoded sources.

Rows of the decoder are right-aligned (see cache.py). Sources are padded on the right; their keys
and values are computed in the decoder's first pass and do not change.

Shape suffixes: B batch, S source, D hidden.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.models.hf.cache import RoomyCache


class Seq2SeqCache(EncoderDecoderCache):
    """The keys and values of both attentions.

    Attributes:
        states_BSD: Output of the encoder.
        attention_BS: 1 = token, 0 = padding; None if no source is padded.
    """

    def __init__(
        self, own: RoomyCache, states_BSD: Tensor, attention_BS: Tensor | None = None
    ) -> None:
        super().__init__(own, DynamicCache())
        self.states_BSD = states_BSD
        self.attention_BS = attention_BS

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only the sources of these rows, in this order."""
        index = torch.tensor(rows, device=self.states_BSD.device)
        attention_BS = None if self.attention_BS is None else self.attention_BS[index]
        # without the columns that no row needs any more
        width = self.states_BSD.shape[1]
        if attention_BS is not None:
            width = int(attention_BS.sum(-1).max())
            attention_BS = attention_BS[:, :width]
        self._set_attention(attention_BS)
        self.states_BSD = self.states_BSD[index, :width]
        for layer in self._layers:
            layer.keys, layer.values = (x[index, :, :width] for x in (layer.keys, layer.values))

    def adopt(self, rows: Sequence[int], other: Seq2SeqCache) -> None:
        """Replace the sources of these rows by those of another cache."""
        index = torch.tensor(rows, device=self.states_BSD.device)
        width = max(self.states_BSD.shape[1], other.states_BSD.shape[1])
        attention_BS = _padded(self._attention(), width, 1).index_copy(
            0, index, _padded(other._attention(), width, 1)
        )
        self._set_attention(attention_BS)
        self.states_BSD = _padded(self.states_BSD, width, 1).index_copy(
            0, index, _padded(other.states_BSD, width, 1)
        )
        for mine, theirs in zip(self._layers, other._layers, strict=True):
            for name in ("keys", "values"):
                old, new = (_padded(getattr(layer, name), width, 2) for layer in (mine, theirs))
                setattr(mine, name, old.index_copy(0, index, new))

    @property
    def _layers(self) -> list[Any]:
        return self.cross_attention_cache.layers

    def _attention(self) -> Tensor:
        if self.attention_BS is not None:
            return self.attention_BS
        return torch.ones(self.states_BSD.shape[:2], dtype=torch.int64).to(self.states_BSD.device)

    def _set_attention(self, attention_BS: Tensor | None) -> None:
        padded = attention_BS is not None and not bool(attention_BS.all())
        self.attention_BS = attention_BS if padded else None


def _padded(values: Tensor, width: int, dim: int) -> Tensor:
    """Append zeros up to `width` entries in this dimension."""
    after = [0, 0] * (values.ndim - 1 - dim) + [0, width - values.shape[dim]]
    return F.pad(values, after)
