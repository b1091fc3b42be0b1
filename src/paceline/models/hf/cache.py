"""A key-value cache with preallocated buffers, whose rows may end at different columns.

Masks and positions of right-aligned rows that differ in length, too. Some decoders (BART, Marian,
M2M100 and their relatives) compute one row of learned or sinusoidal positions from the length of
the cache and take none. Relative positions (T5) need no change, because rows are right-aligned.

Shape suffixes: B batch, N new tokens, W width, H heads, D head size.
"""

from __future__ import annotations

import contextlib
import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from torch import nn
    from transformers import PreTrainedModel


def cache_argument(hf: PreTrainedModel) -> str:
    """The name of the forward pass's argument for the cache: `cache` from transformers 5.24 on."""
    known = inspect.signature(hf.forward).parameters
    return "cache" if "cache" in known else "past_key_values"


class RoomyCache(Cache):
    """Keys and values of all layers; sliding-window layers keep all tokens, too.

    Attributes:
        ends: The column after each row's last token; None if all rows end at the same column.
        plan: Data that a forward pass keeps between calls.
    """

    def __init__(self, kind: type[RoomyLayer] | None = None) -> None:
        self._kind = kind or RoomyLayer
        super().__init__(layer_class_to_replicate=self._kind)
        self.ends: list[int] | None = None
        self.plan: Any = None

    def layer(self, index: int) -> RoomyLayer:
        while len(self.layers) <= index:
            self.layers.append(self._kind())
        return self.layers[index]  # pyright: ignore[reportReturnType]

    def ends_of(self, batch: int) -> list[int]:
        return self.ends or [self.get_seq_length()] * batch

    def end_at(self, ends: list[int]) -> None:
        """Set the column after each row's last token, and the number of columns in use."""
        width = max(ends)
        self.ends = None if min(ends) == width else ends
        layers: Any = self.layers
        for layer in layers:
            layer.width = width

    @torch.inference_mode()
    def adopt(self, rows: Sequence[int], other: RoomyCache, batch: int) -> None:
        """Replace these rows of the batch by the rows of another cache."""
        ends = self.ends_of(batch)
        for row, end in zip(rows, other.ends_of(len(rows)), strict=True):
            ends[row] = end
        for index in range(len(self.layers)):
            self.layer(index).adopt(rows, other.layer(index))
        self.end_at(ends)

    @torch.inference_mode()
    def realign(self, rows: Sequence[int], ends: Sequence[int], width: int) -> None:
        """Copy these rows so that all end at column `width`; row b ended at column ends[b].

        Columns before a row's first token hold arbitrary finite values and are masked.
        """
        columns_BW = (torch.tensor(ends)[:, None] - width + torch.arange(width)).clamp(min=0)
        for index in range(len(self.layers)):
            self.layer(index).select(torch.tensor(rows), columns_BW)
        self.ends = None


class RoomyLayer(DynamicLayer):
    """Keys and values of one layer in buffers [B, H, capacity, D].

    Attributes:
        width: Columns in use.
        buffers: Keys and values; a new list whenever they are reallocated.
    """

    def __init__(self) -> None:
        super().__init__()
        self.width = 0
        self.buffers: list[Tensor] = []

    def update(
        self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append new tokens, [B, H, N, D]; returns all keys and values, [B, H, W, D]."""
        start, end = self.width, self.grow(key_states, value_states)
        for buffer, new in zip(self.buffers, (key_states, value_states), strict=True):
            buffer[:, :, start:end] = new
        keys, values = self.buffers
        return keys[:, :, :end], values[:, :, :end]

    def grow(self, keys_BHND: Tensor, values_BHND: Tensor) -> int:
        """Add columns for tokens that the caller writes; returns the new width."""
        if not self.is_initialized:
            self.lazy_initialization(keys_BHND, values_BHND)
            self.buffers = [_allocate(keys_BHND, 0), _allocate(values_BHND, 0)]
        end = self.width + keys_BHND.shape[2]
        self._reserve(end)
        self.width = end
        return end

    def _reserve(self, end: int) -> None:
        if end > self.buffers[0].shape[2]:
            buffers = [_allocate(old, end) for old in self.buffers]
            for buffer, old in zip(buffers, self.buffers, strict=True):
                buffer[:, :, : self.width] = old[:, :, : self.width]
            self.buffers = buffers

    def adopt(self, rows: Sequence[int], other: RoomyLayer) -> None:
        """Overwrite these rows by the rows of another layer."""
        self._reserve(other.width)
        for buffer, theirs in zip(self.buffers, other.buffers, strict=True):
            for row, new in zip(rows, theirs, strict=True):
                buffer[row, :, : other.width] = new[:, : other.width]

    def select(self, rows_B: Tensor, columns_BW: Tensor) -> None:
        """Keep only these columns of these rows."""
        selected: list[Tensor] = []
        for buffer in self.buffers:
            _, heads, width, _ = buffer.shape
            heads_BH1 = (rows_B[:, None] * heads + torch.arange(heads))[..., None]
            flat = (heads_BH1 * width + columns_BW[:, None]).flatten().to(buffer.device)
            kept = buffer.flatten(0, 2).index_select(0, flat)
            selected.append(kept.view(len(rows_B), heads, -1, buffer.shape[3]))
        self.buffers = selected
        self.width = columns_BW.shape[1]

    def get_seq_length(self) -> int:
        return self.width


def _allocate(new_BHND: Tensor, width: int) -> Tensor:
    # larger than needed, because growing copies all columns
    batch, heads, _, size = new_BHND.shape
    return new_BHND.new_empty(batch, heads, width + width // 2 + 64, size)


def mask_and_positions(ends_B: Tensor, tokens_BN: Tensor) -> dict[str, Tensor]:
    """`attention_mask` over the cache, [B, W], and `position_ids` of the new tokens, [B, N].

    `ends_B` are the lengths of the rows, new tokens included.
    """
    count, device = tokens_BN.shape[1], tokens_BN.device
    width = int(ends_B.max())
    mask_BW = torch.arange(width) >= (width - ends_B)[:, None]
    positions_BN = (ends_B[:, None] - count + torch.arange(count)).clamp(min=0)
    return {
        "attention_mask": mask_BW.to(device, torch.int64),
        "position_ids": positions_BN.to(device),
    }


def takes_positions(hf: PreTrainedModel) -> bool:
    """Whether the model has an argument for positions."""
    forwards: list[Callable[..., Any]] = [hf.forward, hf.base_model.forward]
    return any("position_ids" in inspect.signature(each).parameters for each in forwards)


@contextlib.contextmanager
def at_positions(decoder: nn.Module, positions_BN: Tensor) -> Generator[None]:
    """Within this context, the learned or sinusoidal positions of a decoder are these."""
    table: Any = getattr(decoder, "embed_positions", None)

    def take(_table: Any, inputs: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return inputs, {**named, "position_ids": positions_BN.flatten()}

    def unflatten(_table: Any, _inputs: Any, output: Tensor) -> Tensor:
        return output.view(*positions_BN.shape, -1)

    def from_start(_table: Any, inputs: Any, _named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return inputs[:1], {}  # without the length, which the table compares with its own

    def look_up(_table: Any, _inputs: Any, _output: Tensor) -> Tensor:
        """For tables of M2M100's kind, whose first position follows that of the padding token."""
        rows = positions_BN.flatten() + table.padding_idx + 1
        return table.weights.index_select(0, rows).view(*positions_BN.shape, -1)

    with contextlib.ExitStack() as hooks:
        if table is not None and "position_ids" in inspect.signature(table.forward).parameters:
            hooks.callback(table.register_forward_pre_hook(take, with_kwargs=True).remove)
            hooks.callback(table.register_forward_hook(unflatten).remove)
        elif table is not None:
            hooks.callback(table.register_forward_pre_hook(from_start, with_kwargs=True).remove)
            hooks.callback(table.register_forward_hook(look_up).remove)
        yield
