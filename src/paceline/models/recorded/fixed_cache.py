"""A cache of transformers in buffers of fixed size, each token at the column of its position.

A rollback only reduces lengths: columns beyond them are masked, and the next tokens overwrite them.

Shape suffixes: B buffer rows, N new tokens, W columns, K key heads, D head size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

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
    """

    layers: list[FixedLayer]  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(
        self,
        samples: Iterable[tuple[Tensor, Tensor]],
        num_rows: int,
        num_columns: int,
        recordings: Recordings,
    ) -> None:
        """`samples`: any keys and values of each layer, for their shapes."""
        self.num_rows, self.num_columns = num_rows, num_columns
        self.recordings = recordings

        def buffer(sample: Tensor) -> Tensor:
            # zeros, because unused columns are masked but must be finite
            made = sample.new_zeros(num_rows, sample.shape[1], num_columns, sample.shape[3])
            torch._dynamo.maybe_mark_dynamic(made, 2)  # one compiled function for all widths
            return made

        super().__init__(layers=[FixedLayer(*map(buffer, sample)) for sample in samples])
        device = self.layers[0].keys.device
        self.ones_BW = torch.ones(num_rows, num_columns, dtype=torch.int64, device=device)

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
