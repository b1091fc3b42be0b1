"""Passes whose shapes never change, so that a GPU can replay them: one CUDA graph for a whole half of a block.

Keys and values stand in rooms of a fixed size, each token's at the column of its position, and how many
tokens a row holds is a number on the device. Forgetting tokens is then nothing but a smaller number.
Rooms are made for 1, 2, 4, ... rows and 256, 512, ... columns; what is not used repeats the first row.

Shape suffixes: B rows of the room, N new tokens, W columns, H key heads, D head size.
"""

from __future__ import annotations

import functools
import gc
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from paceline.models.llama.forward import LlamaDecoder

    Inputs = Sequence[Tensor]
    Work = Callable[..., Sequence[Tensor]]

_FEWEST_COLUMNS = 256
_MOST_IDLE = 8  # readers that are kept for other sessions: their rooms take memory


class Recorder:
    """Where recordings of one model are made: one stream and one pool of memory for all.

    They may share it: what a replay gives is copied before the next one begins.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.records = device.type == "cuda"
        if self.records:
            with torch.cuda.device(device):
                self._stream = torch.cuda.Stream()
                self._pool = torch.cuda.graph_pool_handle()

    def record(self, work: Work, inputs: Inputs) -> tuple[torch.cuda.CUDAGraph, Sequence[Tensor]]:
        """The work as a graph, and where its results are after every replay."""
        collects = gc.isenabled()
        gc.disable()  # an old graph that goes while a new one is recorded would spoil that
        try:
            with torch.cuda.device(self._device):
                self._stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(self._stream):
                    work(*inputs)  # libraries set themselves up on their first call
                torch.cuda.current_stream().wait_stream(self._stream)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                    return graph, work(*inputs)
        finally:
            if collects:
                gc.enable()


class Recording:
    """Work on tensors of fixed shapes: replayed where it can be recorded, done anew each time elsewhere."""

    def __init__(self, recorder: Recorder, work: Work, inputs: Inputs) -> None:
        self._work = work
        self._inputs = [given.clone() for given in inputs]
        self._recorded = recorder.record(work, self._inputs) if recorder.records else None

    def __call__(self, inputs: Inputs) -> list[Tensor]:
        """The results, the caller's to keep."""
        for own, given in zip(self._inputs, inputs, strict=True):
            own.copy_(given, non_blocking=True)
        if self._recorded is None:
            return list(self._work(*self._inputs))
        graph, outputs = self._recorded
        graph.replay()
        return [output.clone() for output in outputs]


class FixedReader:
    """Rooms for the keys and values of some rows, and what was recorded on them.

    Attributes:
        num_rows: Of the rooms.
        num_columns: Tokens that a row can hold.
    """

    def __init__(
        self, decoder: LlamaDecoder, recorder: Recorder, num_rows: int, num_columns: int
    ) -> None:
        self.num_rows, self.num_columns = num_rows, num_columns
        self._decoder = decoder
        self._recorder = recorder
        device = decoder.device
        self._ahead = torch.arange(num_columns, device=device)
        self.columns_BN = self._ahead[None, :0]
        self.width = 0
        heads, size = decoder.layers[0].key_heads, decoder.layers[0].head_size
        shape = (num_rows, heads, num_columns, size)
        self._layers = [_Layer(self, shape, decoder.dtype) for _ in decoder.layers]
        self._recordings: dict[Hashable, Recording] = {}

    def run(self, key: Hashable, work: Work, inputs: Inputs) -> list[Tensor]:
        """What the work gives for these inputs, which have the shapes of the first call with this key."""
        recording = self._recordings.get(key)
        if recording is None:
            recording = self._recordings[key] = Recording(self._recorder, work, inputs)
        return recording(inputs)

    def logits(self, tokens_BN: Tensor, lengths_B: Tensor) -> Tensor:
        """Read tokens into rows that hold so many; logits behind each, [B, N, V]."""
        return self._decoder.logits(self._states(tokens_BN, lengths_B))

    def logits_of_prompts(self, tokens_BN: Tensor, lengths_B: Tensor) -> Tensor:
        """Read left-aligned prompts of these lengths into empty rows; logits behind each, [B, V]."""
        states_BND = self._states(tokens_BN, torch.zeros_like(lengths_B), fresh=True)
        last_B11 = (lengths_B - 1)[:, None, None]
        last_BD = states_BND.gather(1, last_B11.expand(-1, 1, states_BND.shape[2]))[:, 0]
        return self._decoder.logits(last_BD)

    def take_over(
        self,
        other: FixedReader,
        rows: Sequence[int],
        width: int,
        places: Sequence[int] | None = None,
    ) -> None:
        """Hold these rows of another reader, or of this one; in these places, or from the first on."""
        chosen = torch.tensor(rows, device=self._ahead.device)
        goals = torch.tensor(places or range(len(rows)), device=self._ahead.device)
        for mine, theirs in zip(self._layers, other._layers, strict=True):
            for room, old in zip(mine.rooms, theirs.rooms, strict=True):
                room[goals, :, :width] = old[chosen, :, :width]

    def layer(self, index: int) -> _Layer:
        """Where a layer leaves its keys and values."""
        return self._layers[index]

    def _states(self, tokens_BN: Tensor, lengths_B: Tensor, *, fresh: bool = False) -> Tensor:
        count = tokens_BN.shape[1]
        self.columns_BN = lengths_B[:, None] + self._ahead[:count]
        self.width = count if fresh else self.num_columns
        mask_of = functools.partial(self._mask, fresh)
        return self._decoder.states(tokens_BN, self.columns_BN, self, mask_of)

    def _mask(self, fresh: bool, window: int | None) -> Tensor | None:
        """0 where a new token sees a column, [B, 1, N, W]; None if plain causality says it all."""
        reach = self.width if window is None else min(window, self.width)
        if fresh and reach == self.width:
            return None
        age_BNW = self.columns_BN[..., None] - self._ahead[: self.width]
        seen_BNW = (age_BNW >= 0) & (age_BNW < reach)
        lowest = torch.finfo(torch.float32).min
        hidden = torch.zeros(seen_BNW.shape, device=seen_BNW.device)
        return hidden.masked_fill_(~seen_BNW, lowest)[:, None]


class _Layer:
    """A layer's keys and values, [B, H, W, D]."""

    def __init__(
        self, reader: FixedReader, shape: tuple[int, int, int, int], dtype: torch.dtype
    ) -> None:
        self._reader = reader
        # zeros: what no token was written to is masked, but it has to be a number
        self.rooms = [
            torch.zeros(shape, dtype=dtype, device=reader.columns_BN.device) for _ in "kv"
        ]

    def append(self, keys_BHND: Tensor, values_BHND: Tensor) -> tuple[Tensor, Tensor]:
        """Write the new tokens' at their columns; all that can be looked at."""
        index_BHND = self._reader.columns_BN[:, None, :, None].expand(keys_BHND.shape)
        for room, new in zip(self.rooms, (keys_BHND, values_BHND), strict=True):
            room.scatter_(2, index_BHND, new.to(room.dtype))
        keys, values = (room[:, :, : self._reader.width] for room in self.rooms)
        return keys, values


class FixedReaders:
    """The readers of one model: sessions take one, and give it back with what it has recorded."""

    def __init__(self, decoder: LlamaDecoder) -> None:
        self._decoder = decoder
        self._recorder = Recorder(decoder.device)
        self._idle: list[FixedReader] = []

    @torch.inference_mode()
    def take(self, num_rows: int, num_columns: int) -> FixedReader:
        """One with rooms for at least so many rows and columns."""
        shape = rows_for(num_rows), _power_of_two(num_columns, _FEWEST_COLUMNS)
        for reader in self._idle:
            if (reader.num_rows, reader.num_columns) == shape:
                self._idle.remove(reader)
                return reader
        return FixedReader(self._decoder, self._recorder, *shape)

    def give_back(self, reader: FixedReader) -> None:
        """Let another session have it."""
        self._idle.append(reader)
        del self._idle[:-_MOST_IDLE]


def rows_for(count: int) -> int:
    """Rows of the rooms that so many rows are held in."""
    return _power_of_two(count, 1)


def _power_of_two(wanted: int, least: int) -> int:
    while least < wanted:
        least *= 2
    return least


def can_record(config: Any) -> bool:
    """Are positions turned the same way at every length? Else the host has to look at them."""
    rope: Any = getattr(config, "rope_parameters", None) or {}
    return rope.get("rope_type", "default") not in ("dynamic", "longrope")
