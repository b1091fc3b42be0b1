"""A cache of transformers in buffers of fixed size, each token at the column of its position.

A rollback only reduces lengths: columns beyond them are masked, and the next tokens overwrite them.

Shape suffixes: B buffer rows, N new tokens, W columns, S source columns, K key heads, D head size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, EncoderDecoderCache

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from paceline.models.recorded.recorder import Recordings


class FixedLayer(CacheLayerMixin):
    """Keys and values of one layer, [B, K, W, D]; each may have heads and sizes of its own.

    Attributes:
        columns_BN: Where the next tokens go. None: to the first columns of empty rows, where they
            attend to each other only.
    """

    is_compileable = True
    is_sliding = False
    keys: Any  # tensors, which are optional in the base class
    values: Any

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.keys, self.values = keys, values
        self.is_initialized = True
        self.columns_BN: Tensor | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: the buffers are there."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the keys and values of new tokens; returns all that are visible."""
        if self.columns_BN is None:
            self.write(slice(len(key_states)), key_states, value_states)
            return key_states, value_states
        # not scatter_: Inductor would copy the whole buffer
        rows_B1 = torch.arange(len(self.columns_BN), device=self.keys.device)[:, None]
        for buffer, new in ((self.keys, key_states), (self.values, value_states)):
            buffer[rows_B1, :, self.columns_BN] = new.transpose(1, 2).to(buffer.dtype)
        return self.keys, self.values

    def write(self, rows: slice | Tensor, keys: Tensor, values: Tensor) -> None:
        """Write keys and values, [R, K, N, D], to the first columns of these rows."""
        self.keys[rows, :, : keys.shape[2]] = keys
        self.values[rows, :, : values.shape[2]] = values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return (query_length if self.columns_BN is None else self.keys.shape[2]), 0

    def get_seq_length(self) -> Any:
        """Tokens before the new ones: 0, or a number for each row, [B, 1]."""
        return 0 if self.columns_BN is None else self.columns_BN[:, :1]

    def get_max_length(self) -> int:
        return self.keys.shape[2]


class FixedCache(Cache):
    """Buffers of all layers, and the recorded passes over them.

    Attributes:
        ones_BW: An attention mask that hides nothing, for models that compute positions from it.
        sources: What the decoder of an encoder-decoder sees of its sources; else None.
    """

    layers: list[FixedLayer]  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(
        self,
        samples: Iterable[tuple[Tensor, Tensor]],
        num_rows: int,
        num_columns: int,
        recordings: Recordings,
        sources: FixedSources | None = None,
    ) -> None:
        """`samples`: any keys and values of each layer, for their shapes."""
        self.num_rows, self.num_columns = num_rows, num_columns
        self.recordings = recordings
        self.sources = sources
        super().__init__(layers=_layers(samples, num_rows, num_columns))
        device = self.layers[0].keys.device
        self.ones_BW = torch.ones(num_rows, num_columns, dtype=torch.int64, device=device)

    @property
    def num_sources(self) -> int:
        return 0 if self.sources is None else self.sources.attention_BS.shape[1]

    @property
    def whole(self) -> Cache:
        """The cache as its model expects it."""
        return self if self.sources is None else WithSources(self, self.sources)

    def place(self, columns_BN: Tensor | None) -> None:
        """Set `FixedLayer.columns_BN` of all layers."""
        for layer in self.layers:
            layer.columns_BN = columns_BN

    def copy_rows(
        self,
        other: FixedCache,
        rows: Sequence[int],
        width: int,
        own_rows: Sequence[int] | None = None,
    ) -> None:
        """Copy rows of a cache (may be this one) into `own_rows`, by default the first rows."""
        source = torch.tensor(rows, device=self.ones_BW.device)
        goal = torch.tensor(own_rows or range(len(rows)), device=self.ones_BW.device)
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            keys, values = (part[source, :, :width] for part in (theirs.keys, theirs.values))
            mine.write(goal, keys, values)
        if self.sources is not None and other.sources is not None:
            self.sources.copy_rows(other.sources, source, goal)


class FixedSources(Cache):
    """Keys and values of encoded sources, from the first column of each row.

    Attributes:
        attention_BS: 1 = token, 0 = padding.
    """

    layers: list[FixedLayer]  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(
        self, samples: Iterable[tuple[Tensor, Tensor]], num_rows: int, num_columns: int
    ) -> None:
        super().__init__(layers=_layers(samples, num_rows, num_columns))
        device = self.layers[0].keys.device
        self.attention_BS = torch.zeros(num_rows, num_columns, dtype=torch.int64, device=device)

    def fill(self, layers: Iterable[Any], attention_BS: Tensor) -> None:
        """Store sources in the first rows; `layers` have `keys` and `values`."""
        rows, width = attention_BS.shape
        self.attention_BS[:rows] = 0
        self.attention_BS[:rows, :width] = attention_BS
        for mine, given in zip(self.layers, layers, strict=True):
            mine.write(slice(rows), given.keys, given.values)

    def copy_rows(self, other: FixedSources, rows_R: Tensor, own_rows_R: Tensor) -> None:
        """Copy rows of other sources, which have at most as many columns (may be these)."""
        width = other.attention_BS.shape[1]
        copied_RS = other.attention_BS[rows_R]
        self.attention_BS[own_rows_R] = 0
        self.attention_BS[own_rows_R, :width] = copied_RS
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            mine.write(own_rows_R, theirs.keys[rows_R], theirs.values[rows_R])


class WithSources(EncoderDecoderCache):
    """The cache of a decoder, and the keys and values of its sources, which are not made anew."""

    def __init__(self, own: Any, sources: Any) -> None:
        self.self_attention_cache, self.cross_attention_cache = own, sources
        self.is_updated = dict.fromkeys(range(len(sources.layers)), True)


def _layers(samples: Iterable[tuple[Tensor, Tensor]], num_rows: int, num_columns: int) -> list[Any]:
    def buffer(sample: Tensor) -> Tensor:
        # zeros, because unused columns are masked but must be finite
        made = sample.new_zeros(num_rows, sample.shape[1], num_columns, sample.shape[3])
        torch._dynamo.maybe_mark_dynamic(made, 2)  # one compiled function for all widths
        return made

    return [FixedLayer(*map(buffer, sample)) for sample in samples]
