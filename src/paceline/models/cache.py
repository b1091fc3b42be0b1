"""Keys and values of a batch of texts, right-aligned, with room to grow.

Shape suffixes: B batch, N new tokens, W width, H heads, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer


class RoomyCache(Cache):
    """One set of keys and values a layer, whole also where the model looks through a window."""

    def __init__(self) -> None:
        super().__init__(layer_class_to_replicate=RoomyLayer)

    def layer(self, index: int) -> RoomyLayer:
        while len(self.layers) <= index:
            self.layers.append(RoomyLayer())
        return self.layers[index]  # pyright: ignore[reportReturnType]

    @torch.inference_mode()
    def forget(self, count: int) -> None:
        """Drop the last columns of every row."""
        for index in range(len(self.layers)):
            self.layer(index).width -= count

    @torch.inference_mode()
    def realign(self, rows_B: Tensor, ends_B: Tensor, width: int) -> None:
        """Keep the `width` columns before column ends_B[b] of each of these rows, as its last.

        Columns before a row's first token hold whatever was there: finite, and masked.
        """
        columns_BW = (ends_B[:, None] - width + torch.arange(width)).clamp(min=0)
        for index in range(len(self.layers)):
            layer = self.layer(index)
            flat = (rows_B[:, None] * layer.width + columns_BW).flatten()
            layer.select(flat.to(layer.rooms[0].device), len(rows_B))


class RoomyLayer(DynamicLayer):
    """Appending copies the new tokens only. Stored as [B, W, H, D]: a token is one stretch."""

    def __init__(self) -> None:
        super().__init__()
        self.width = 0
        self.rooms: list[Tensor] = []

    def update(
        self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """The transformers way in: [B, H, N, D]."""
        return self.append(key_states.transpose(1, 2), value_states.transpose(1, 2))

    def append(self, keys_BNHD: Tensor, values_BNHD: Tensor) -> tuple[Tensor, Tensor]:
        """Add tokens; all keys and values so far, [B, H, W, D]."""
        if not self.is_initialized:
            self.lazy_initialization(keys_BNHD, values_BNHD)
            self.rooms = [_room(keys_BNHD, 0), _room(values_BNHD, 0)]
        end = self.width + keys_BNHD.shape[1]
        for index, new in enumerate((keys_BNHD, values_BNHD)):
            if end > self.rooms[index].shape[1]:
                room = _room(new, end)
                room[:, : self.width] = self.rooms[index][:, : self.width]
                self.rooms[index] = room
            self.rooms[index][:, self.width : end] = new
        self.width = end
        keys, values = self.rooms
        return keys[:, :end].transpose(1, 2), values[:, :end].transpose(1, 2)

    def select(self, flat: Tensor, batch: int) -> None:
        """Replace the contents by these (row * width + column) entries, as `batch` rows."""
        rooms = []
        for room in self.rooms:
            entries = room[:, : self.width].flatten(0, 1).index_select(0, flat)
            rooms.append(entries.view(batch, len(flat) // batch, *room.shape[2:]))
        self.rooms = rooms
        self.width = len(flat) // batch

    def get_seq_length(self) -> int:
        return self.width

    def crop(self, tokens_to_remove: int) -> None:
        self.width -= abs(tokens_to_remove)


def _room(new_BNHD: Tensor, width: int) -> Tensor:
    """Space for so many columns and half as many again."""
    batch, _, heads, size = new_BNHD.shape
    return new_BNHD.new_zeros(batch, width + width // 2 + 32, heads, size)
