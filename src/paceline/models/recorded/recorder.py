"""Records functions of fixed shapes as CUDA graphs, and replays them."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    Inputs = Sequence[Tensor]
    Work = Callable[..., Sequence[Tensor]]


class Recorder:
    """Records the CUDA graphs of one model on one stream, with one memory pool."""

    def __init__(self, device: torch.device, *, records: bool = True) -> None:
        """Without `records`, functions are called anew each time, as on a CPU."""
        self._device = device
        self.records = records and device.type == "cuda"
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
                    work(*inputs)  # warm-up: libraries initialize, and code is compiled
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


class Recordings:
    """The recordings of one cache."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._made: dict[Hashable, Recording] = {}

    def __len__(self) -> int:
        return len(self._made)

    def run(self, key: Hashable, work: Work, inputs: Inputs) -> list[Tensor]:
        """Run the recording of this key; input shapes must be those of its first call."""
        recording = self._made.get(key)
        if recording is None:
            recording = self._made[key] = Recording(self._recorder, work, inputs)
        return recording(inputs)
