"""What a recorder does with work that can be recorded and with work that cannot.

No GPU here: the functions of torch.cuda are stand-ins that note in which state the work is called.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch

from paceline.core.sampling import SamplingParams
from paceline.decode import SpeculativeDecoder
from paceline.errors import SlowerWarning
from paceline.models import wrap_model
from paceline.models.prepare import with_cuda_graphs
from paceline.models.recorded.recorder import Recorder, Recording
from support.models import generated, tiny_hf, tiny_model

if TYPE_CHECKING:
    from collections.abc import Generator

GREEDY = SamplingParams(temperature=0)
PROMPTS = [[3, 4, 5], [7], [9, 8, 7, 6, 5, 4]]


class FakeGraph:
    def replay(self) -> None:
        """The results are there already."""


class FakeStream:
    def wait_stream(self, _other: FakeStream) -> None:
        """There is one."""


class Card:
    """The state of a card: its stream, the debug mode, and whether a capture is under way."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.own = self.stream = FakeStream()
        self.mode: int | str = 0
        self.captures = self.has_warned = False
        self.seen: list[tuple[bool, int | str, bool]] = []
        for name, function in {
            "Stream": FakeStream,
            "CUDAGraph": FakeGraph,
            "graph": self.graph,
            "graph_pool_handle": object,
            "device": lambda _device: contextlib.nullcontext(),
            "stream": lambda _stream: contextlib.nullcontext(),
            "current_stream": lambda: self.stream,
            "set_stream": functools.partial(setattr, self, "stream"),
            "get_sync_debug_mode": lambda: self.mode,
            "set_sync_debug_mode": self.set_mode,
            "is_current_stream_capturing": lambda: self.captures,
        }.items():
            monkeypatch.setattr(torch.cuda, name, function)

    @contextlib.contextmanager
    def graph(self, _graph: FakeGraph, *, stream: FakeStream, **_: Any) -> Generator[None]:
        """As torch's: after an error, the capture's stream stays the current one."""
        self.stream, self.captures = stream, True
        yield
        self.stream, self.captures = self.own, False

    def set_mode(self, mode: int | str) -> None:
        """As torch's, which warns once per process."""
        if not self.has_warned:
            self.has_warned = True
            warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=2)
        self.mode = mode

    def note(self) -> None:
        self.seen.append((torch.cuda.is_current_stream_capturing(), self.mode, self.captures))

    def recorder(self, *, falls_back: bool = True) -> Recorder:
        return Recorder(torch.device("cuda"), "llama", falls_back=falls_back)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    return Card(monkeypatch)


def test_work_branches_before_the_capture_as_within(card: Card):
    def work(values: torch.Tensor) -> list[torch.Tensor]:
        card.note()
        return [values + 1]

    recording = Recording(card.recorder(), work, [torch.tensor([1, 2])])
    assert card.seen == [(True, 0, False), (True, "error", False), (True, 0, True)]
    assert (card.mode, card.stream) == (0, card.own)
    assert not torch.cuda.is_current_stream_capturing()
    assert recording([torch.tensor([1, 2])])[0].tolist() == [2, 3]
    assert len(card.seen) == 3, "replayed"


@pytest.mark.parametrize("late", [False, True], ids=["found before", "in the capture"])
def test_work_that_cannot_be_recorded_is_called_anew(card: Card, late: bool):
    def work(values: torch.Tensor) -> list[torch.Tensor]:
        if card.captures if late else card.mode == "error":
            raise RuntimeError("called a synchronizing CUDA operation")
        return [2 * values]

    recorder = card.recorder()
    with pytest.warns(SlowerWarning, match=r"cannot be recorded \(called a .*\) for this llama"):
        recording = Recording(recorder, work, [torch.tensor([1, 2])])
    card.captures = False  # what a failed capture leaves in torch is not ours to mend
    assert (card.mode, card.stream) == (0, card.own)
    assert gc.isenabled()
    for value in (5, 7):
        assert recording([torch.tensor([value, 1])])[0].tolist() == [2 * value, 2]
    Recording(recorder, work, [torch.tensor([1])])  # without a second warning
    card.captures = False
    trial = card.recorder(falls_back=False)
    with pytest.raises(RuntimeError, match="synchronizing CUDA operation"):
        Recording(trial, work, [torch.tensor([1])])
    card.captures = False
    assert (card.mode, card.stream) == (0, card.own)
    assert not torch.cuda.is_current_stream_capturing()


def test_idle_buffers_make_room_for_another(monkeypatch: pytest.MonkeyPatch):
    hf = tiny_hf("llama")
    model: Any = with_cuda_graphs(wrap_model(hf))
    decoder = SpeculativeDecoder(model, model, gamma=3, sampling=GREEDY)
    decoder.generate(PROMPTS, 5, seed=1)
    gc.collect()
    caches = model.start_session()._caches
    assert caches._idle
    make, refused = model.decoder.new_cache, []

    def new_cache(*sizes: Any) -> Any:
        if caches._idle:
            refused.append(sizes)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return make(*sizes)

    monkeypatch.setattr(model.decoder, "new_cache", new_cache)
    texts = decoder.generate([PROMPTS[2]] * 8, 9, seed=1)
    assert refused
    assert [text.tokens for text in texts] == [generated(hf, PROMPTS[2], 9)] * 8


def test_experts_of_many_tokens_are_not_copied_for_each():
    """Products of experts in a batch need no host, and memory for each token."""
    model: Any = with_cuda_graphs(tiny_model("qwen3_moe"))
    copied = model.decoder._copy
    seen: list[str] = []
    forward = copied.forward

    def noted(*given: Any, **named: Any) -> Any:
        seen.append(copied.config._experts_implementation)
        return forward(*given, **named)

    copied.forward = noted
    for rows, count in ((1, 4), (1, 17), (8, 2), (8, 3)):
        held = model.start_session()
        held.prefill([[3, 4, 5]] * rows)
        held.extend(torch.full((rows, count), 7))
    assert seen == ["batched_mm", "grouped_mm", "batched_mm", "grouped_mm"]


def test_many_short_prompts_take_no_logits_of_each_other():
    """A recorded pass gives logits at the end of every row in each row."""
    hf = tiny_hf("llama")
    model = with_cuda_graphs(wrap_model(hf))
    counted: list[int] = []
    head = hf.get_output_embeddings()
    head.register_forward_hook(lambda _m, _in, out: counted.append(out.shape[0] * out.shape[1]))
    session_ = model.start_session()
    got = session_.prefill([[3, 4, 5]] * 64)
    assert max(counted) <= 1024
    plain = wrap_model(tiny_hf("llama")).start_session().prefill([[3, 4, 5]])
    torch.testing.assert_close(got, plain.expand(64, -1), rtol=1e-4, atol=1e-4)
