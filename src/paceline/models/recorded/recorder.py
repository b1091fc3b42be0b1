"""Records functions of fixed shapes as CUDA graphs, and replays them."""

from __future__ import annotations

import contextlib
import gc
import threading
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline.errors import first_line
from paceline.models.hf.base import warn_of_slower

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Hashable, Sequence

    Inputs = Sequence[Tensor]
    Work = Callable[..., Sequence[Tensor]]
    Recorded = tuple[torch.cuda.CUDAGraph, Sequence[Tensor]]
    """A graph, with the tensors that hold its results after each replay."""


class Recorder:
    """Records the CUDA graphs of one model on one stream, with one memory pool."""

    def __init__(
        self,
        device: torch.device,
        architecture: str,
        *,
        records: bool = True,
        falls_back: bool = True,
    ) -> None:
        """Without `records`, functions are called anew each time, as on a CPU.

        `falls_back`: call work anew if it cannot be recorded, with one warning; else it raises.
        """
        self._device = device
        self._falls_back = falls_back
        self._architecture = architecture
        self._has_warned = False
        self.records = records and device.type == "cuda"
        if self.records:
            with torch.cuda.device(device):
                self._stream = torch.cuda.Stream()
                self._pool = torch.cuda.graph_pool_handle()

    def record(self, work: Work, inputs: Inputs) -> Recorded | None:
        """Record a graph; None if the work cannot be recorded and is to be called anew."""
        collects = gc.isenabled()
        gc.disable()  # freeing an old graph would break the capture
        try:
            with torch.cuda.device(self._device):
                return self._capture(work, inputs)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            if not self._falls_back:
                raise
            if not self._has_warned:
                self._has_warned = True
                fault = f"a pass cannot be recorded ({first_line(error)})"
                warn_of_slower(self._architecture, fault, stacklevel=2)
            return None
        finally:
            if collects:
                gc.enable()

    def _capture(self, work: Work, inputs: Inputs) -> Recorded:
        """A failed capture can leave the process unusable, so failures are found before it."""
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(self._stream):
                for strict in (False, True):  # first, libraries initialize, and code is compiled
                    with _as_if_captured(strict=strict):
                        work(*inputs)
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                return graph, work(*inputs)
        finally:
            torch.cuda.set_stream(current)  # a failed capture leaves its own
            current.wait_stream(self._stream)


@contextlib.contextmanager
def _as_if_captured(*, strict: bool) -> Generator[None]:
    """Let code of this thread branch as in a capture.

    `strict`: what waits for the device raises RuntimeError.
    """
    cuda: Any = torch.cuda
    mode, asked = cuda.get_sync_debug_mode(), cuda.is_current_stream_capturing
    own = threading.get_ident()
    cuda.is_current_stream_capturing = lambda: threading.get_ident() == own or asked()
    try:
        with warnings.catch_warnings():  # of the first call of a process
            warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
            cuda.set_sync_debug_mode("error" if strict else mode)
        yield
    finally:
        cuda.is_current_stream_capturing = asked
        cuda.set_sync_debug_mode(mode)


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

    def clear(self) -> None:
        """Forget all; their functions hold the cache, which would be freed late."""
        self._made.clear()

    def run(self, key: Hashable, work: Work, inputs: Inputs) -> list[Tensor]:
        """Run the recording of this key; input shapes must be those of its first call."""
        recording = self._made.get(key)
        if recording is None:
            recording = self._made[key] = Recording(self._recorder, work, inputs)
        return recording(inputs)
