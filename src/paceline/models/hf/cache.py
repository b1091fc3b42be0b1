"""Keys and values of a batch of texts, right-aligned where torch reads them, with room to grow.

Shape suffixes: B batch, N new tokens, W width, H heads, D head size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

if TYPE_CHECKING:
    from collections.abc import Sequence


class RoomyCache(Cache):
    """One set of keys and values a layer, whole also where the model looks through a window.

    Attributes:
        ends: The column behind each row's last token, where they differ; None: all rows end together.
        plan: Of the reader that wants to keep something between its passes.
    """

    def __init__(self) -> None:
        super().__init__(layer_class_to_replicate=RoomyLayer)
        self.ends: list[int] | None = None
        self.plan: Any = None

    def layer(self, index: int) -> RoomyLayer:
        while len(self.layers) <= index:
            self.layers.append(RoomyLayer())
        return self.layers[index]  # pyright: ignore[reportReturnType]

    def ends_of(self, batch: int) -> list[int]:
        """The column behind each row's last token."""
        return self.ends or [self.get_seq_length()] * batch

    def forget(self, counts: Sequence[int]) -> None:
        """Drop the last tokens of each row, in place: rows may end at different columns then."""
        ends = [end - count for end, count in zip(self.ends_of(len(counts)), counts, strict=True)]
        self.end_at(ends)

    def end_at(self, ends: list[int]) -> None:
        """Say behind which columns the rows end; columns up to there are in use."""
        width = max(ends)
        self.ends = None if min(ends) == width else ends
        layers: Any = self.layers
        for layer in layers:
            layer.width = width

    @torch.inference_mode()
    def keep(self, rows: Sequence[int], batch: int) -> None:
        """Keep these rows of the batch, in this order, where they are or further ahead."""
        ends = self.ends_of(batch)
        for index in range(len(self.layers)):
            self.layer(index).keep(rows)
        self.end_at([ends[row] for row in rows])

    @torch.inference_mode()
    def adopt(self, rows: Sequence[int], other: RoomyCache, batch: int) -> None:
        """Put the rows of another cache in the places of these of the batch."""
        ends = self.ends_of(batch)
        for row, end in zip(rows, other.ends_of(len(rows)), strict=True):
            ends[row] = end
        for index in range(len(self.layers)):
            self.layer(index).adopt(rows, other.layer(index))
        self.end_at(ends)

    @torch.inference_mode()
    def realign(self, rows: Sequence[int], ends: Sequence[int], width: int) -> None:
        """Keep the `width` columns before column ends[b] of each of these rows, as its last.

        Columns before a row's first token hold whatever was there: finite, and masked.
        """
        columns_BW = (torch.tensor(ends)[:, None] - width + torch.arange(width)).clamp(min=0)
        for index in range(len(self.layers)):
            self.layer(index).select(torch.tensor(rows), columns_BW)
        self.ends = None


class RoomyLayer(DynamicLayer):
    """Appending copies the new tokens only. Stored as [B, H, W, D], which products read in one go.

    Attributes:
        width: Columns in use.
        rooms: Keys and values, columns not in use included; another list whenever they move.
    """

    def __init__(self) -> None:
        super().__init__()
        self.width = 0
        self.rooms: list[Tensor] = []

    def update(
        self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """The transformers way in: [B, H, N, D]."""
        return self.append(key_states, value_states)

    def append(self, keys_BHND: Tensor, values_BHND: Tensor) -> tuple[Tensor, Tensor]:
        """Add tokens; all keys and values so far, [B, H, W, D]."""
        start, end = self.width, self.make_room(keys_BHND, values_BHND)
        for room, new in zip(self.rooms, (keys_BHND, values_BHND), strict=True):
            room[:, :, start:end] = new
        keys, values = self.rooms
        return keys[:, :, :end], values[:, :, :end]

    def make_room(self, keys_BHND: Tensor, values_BHND: Tensor) -> int:
        """Widen by the columns of such tokens, to be written by the caller; the new width."""
        if not self.is_initialized:
            self.lazy_initialization(keys_BHND, values_BHND)
            self.rooms = [_room(keys_BHND, 0), _room(values_BHND, 0)]
        end = self.width + keys_BHND.shape[2]
        self._reach(end)
        self.width = end
        return end

    def _reach(self, end: int) -> None:
        if end > self.rooms[0].shape[2]:
            rooms = [_room(old, end) for old in self.rooms]
            for room, old in zip(rooms, self.rooms, strict=True):
                room[:, :, : self.width] = old[:, :, : self.width]
            self.rooms = rooms

    def keep(self, rows: Sequence[int]) -> None:
        """Move rows ahead, each to a place that is not needed any more; nothing is allocated."""
        assert all(new <= old for new, old in enumerate(rows)), "rows keep their order"
        for room in self.rooms:
            for new, old in enumerate(rows):
                if new != old:
                    room[new] = room[old]
        self.rooms = [room[: len(rows)] for room in self.rooms]

    def adopt(self, rows: Sequence[int], other: RoomyLayer) -> None:
        """Write the rows of another layer over these, from the first column on."""
        self._reach(other.width)
        for room, theirs in zip(self.rooms, other.rooms, strict=True):
            for row, new in zip(rows, theirs, strict=True):
                room[row, :, : other.width] = new[:, : other.width]

    def select(self, rows_B: Tensor, columns_BW: Tensor) -> None:
        """Replace the contents by these columns of these rows."""
        selected: list[Tensor] = []
        for room in self.rooms:
            _, heads, width, _ = room.shape
            heads_BH1 = (rows_B[:, None] * heads + torch.arange(heads))[..., None]
            flat = (heads_BH1 * width + columns_BW[:, None]).flatten().to(room.device)
            kept = room.flatten(0, 2).index_select(0, flat)
            selected.append(kept.view(len(rows_B), heads, -1, room.shape[3]))
        self.rooms = selected
        self.width = columns_BW.shape[1]

    def get_seq_length(self) -> int:
        return self.width

    def crop(self, tokens_to_remove: int) -> None:
        self.width -= abs(tokens_to_remove)


def _room(new_BHND: Tensor, width: int) -> Tensor:
    """Space for so many columns and many more: whenever it runs out, all of them move.

    Not filled: a column is read only once it is written.
    """
    batch, heads, _, size = new_BHND.shape
    return new_BHND.new_empty(batch, heads, width + width // 2 + 64, size)
