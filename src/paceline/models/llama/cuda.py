"""Passes of fixed shapes, recorded as CUDA graphs: one graph for each half of a block.

Keys and values are in fixed-size buffers, each token at the column of its position. Row lengths
are a tensor on the device, so a rollback only reduces lengths. Buffers have 1, 2, 4, ... rows and
256, 512, ... columns; unused rows repeat the first row.

Shape suffixes: B buffer rows, N new tokens, W columns, H key heads, D head size.
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
_MOST_IDLE = 8  # idle readers to keep for other sessions; their buffers take memory


class Recorder:
    """Records the CUDA graphs of one model on one stream, with one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.records = device.type == "cuda"
        if self.records:
            with torch.cuda.device(device):
                self._stream = torch.cuda.Stream()
                self._pool = torch.cuda.graph_pool_handle()

    def record(self, work: Work, inputs: Inputs) -> tuple[torch.cuda.CUDAGraph, Sequence[Tensor]]:
        """Record a graph; returns it with the tensors that hold its results after each replay."""
        collects = gc.isenabled()
        gc.disable()  # freeing an old graph would break the capture
        try:
            with torch.cuda.device(self._device):
                self._stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(self._stream):
                    work(*inputs)  # warm-up: libraries initialize on their first call
                torch.cuda.current_stream().wait_stream(self._stream)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                    return graph, work(*inputs)
        finally:
            if collects:
                gc.enable()


class Recording:
    """A function of fixed-shape tensors, replayed as a CUDA graph on a GPU, called elsewhere."""

    def __init__(self, recorder: Recorder, work: Work, inputs: Inputs) -> None:
        self._work = work
        self._inputs = [given.clone() for given in inputs]
        self._recorded = recorder.record(work, self._inputs) if recorder.records else None

    def __call__(self, inputs: Inputs) -> list[Tensor]:
        for own, given in zip(self._inputs, inputs, strict=True):
            own.copy_(given, non_blocking=True)
        if self._recorded is None:
            return list(self._work(*self._inputs))
        graph, outputs = self._recorded
        graph.replay()
        return [output.clone() for output in outputs]  # the next replay overwrites them


class FixedReader:
    """Key-value buffers of each layer, [num_rows, H, num_columns, D], and their recorded graphs."""

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
        """Run the recording of this key; input shapes must be those of its first call."""
        recording = self._recordings.get(key)
        if recording is None:
            recording = self._recordings[key] = Recording(self._recorder, work, inputs)
        return recording(inputs)

    def logits(self, tokens_BN: Tensor, lengths_B: Tensor) -> Tensor:
        """Append tokens to rows of these lengths; logits after each token, [B, N, V]."""
        return self._decoder.logits(self._states(tokens_BN, lengths_B))

    def logits_of_prompts(self, tokens_BN: Tensor, lengths_B: Tensor) -> Tensor:
        """Process left-aligned prompts in empty rows; logits after each prompt, [B, V]."""
        states_BND = self._states(tokens_BN, torch.zeros_like(lengths_B), fresh=True)
        last_B11 = (lengths_B - 1)[:, None, None]
        last_BD = states_BND.gather(1, last_B11.expand(-1, 1, states_BND.shape[2]))[:, 0]
        return self._decoder.logits(last_BD)

    def copy_rows(
        self,
        other: FixedReader,
        rows: Sequence[int],
        width: int,
        own_rows: Sequence[int] | None = None,
    ) -> None:
        """Copy rows of a reader (may be this one) into `own_rows`, by default the first rows."""
        source = torch.tensor(rows, device=self._ahead.device)
        goal = torch.tensor(own_rows or range(len(rows)), device=self._ahead.device)
        for mine, theirs in zip(self._layers, other._layers, strict=True):
            for buffer, old in zip(mine.buffers, theirs.buffers, strict=True):
                buffer[goal, :, :width] = old[source, :, :width]

    def layer(self, index: int) -> _Layer:
        return self._layers[index]

    def _states(self, tokens_BN: Tensor, lengths_B: Tensor, *, fresh: bool = False) -> Tensor:
        count = tokens_BN.shape[1]
        self.columns_BN = lengths_B[:, None] + self._ahead[:count]
        self.width = count if fresh else self.num_columns
        mask_of = functools.partial(self._mask, fresh)
        return self._decoder.states(tokens_BN, self.columns_BN, self, mask_of)

    def _mask(self, fresh: bool, window: int | None) -> Tensor | None:
        """Additive mask [B, 1, N, W], or None if a causal mask is sufficient."""
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
        device = reader.columns_BN.device
        # zeros, because unused columns are masked but must be finite
        self.buffers = [torch.zeros(shape, dtype=dtype, device=device) for _ in "kv"]

    def append(self, keys_BHND: Tensor, values_BHND: Tensor) -> tuple[Tensor, Tensor]:
        """Write the keys and values of new tokens; returns all that are visible."""
        index_BHND = self._reader.columns_BN[:, None, :, None].expand(keys_BHND.shape)
        for buffer, new in zip(self.buffers, (keys_BHND, values_BHND), strict=True):
            buffer.scatter_(2, index_BHND, new.to(buffer.dtype))
        keys, values = (buffer[:, :, : self._reader.width] for buffer in self.buffers)
        return keys, values


class FixedReaders:
    """The pool of readers of one model; a session returns its reader with its recordings."""

    def __init__(self, decoder: LlamaDecoder) -> None:
        self._decoder = decoder
        self._recorder = Recorder(decoder.device)
        self._idle: list[FixedReader] = []

    @torch.inference_mode()
    def take(self, num_rows: int, num_columns: int) -> FixedReader:
        shape = rows_for(num_rows), _power_of_two(num_columns, _FEWEST_COLUMNS)
        for reader in self._idle:
            if (reader.num_rows, reader.num_columns) == shape:
                self._idle.remove(reader)
                return reader
        return FixedReader(self._decoder, self._recorder, *shape)

    def give_back(self, reader: FixedReader) -> None:
        self._idle.append(reader)
        del self._idle[:-_MOST_IDLE]


def rows_for(count: int) -> int:
    """Buffer rows of a reader for `count` texts."""
    return _power_of_two(count, 1)


def _power_of_two(wanted: int, least: int) -> int:
    while least < wanted:
        least *= 2
    return least


def can_record(config: Any) -> bool:
    """True if rotary angles do not depend on the length; else the host has to compute them."""
    rope: Any = getattr(config, "rope_parameters", None) or {}
    return rope.get("rope_type", "default") not in ("dynamic", "longrope")
