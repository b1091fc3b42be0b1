"""Passes over a cache of fixed size: compiled once for all layers, and wrong ones are not used.

The reference is transformers' pass over a whole text, without a cache.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor import config as inductor
from torch._inductor.utils import run_and_get_code
from transformers import AttentionMaskInterface

from paceline.core.sampling import SamplingParams
from paceline.decode import AutoregressiveDecoder, SpeculativeDecoder
from paceline.errors import SlowerWarning
from paceline.models import wrap_model
from paceline.models.admission.model import EXACT, ROUNDED
from paceline.models.admission.trial import play
from paceline.models.prepare import with_cuda_graphs
from paceline.models.recorded import attention
from paceline.models.recorded.fixed_cache import FixedLayer
from paceline.models.recorded.fixed_pass import FixedPass
from support.models import generated, tiny_hf, tiny_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PROMPTS = [[3, 4, 5], [9, 8, 7, 6, 5, 4]]
GREEDY = SamplingParams(temperature=0)


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[CompileCounterWithBackend]:
    """Counts graphs, and traces them without generating code."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda plain, **_: compile_(plain, backend=counter))
    yield counter
    torch._dynamo.reset()


def texts_of(model: Any, **options: Any) -> list[list[int]]:
    decoder = SpeculativeDecoder(model, model, gamma=3, sampling=GREEDY)
    return [text.tokens for text in decoder.generate(PROMPTS, 12, seed=1, **options)]


KINDS = ["sliding_attention", "full_attention", "sliding_attention"]


@pytest.mark.slow
def test_layers_of_a_kind_share_one_function(
    backend: CompileCounterWithBackend, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("paceline.models.recorded.session._FEWEST_COLUMNS", 16)
    monkeypatch.setattr("paceline.models.recorded.session.SPARE", 0)  # texts move to 32 columns
    counts: list[int] = []
    for depth in (2, 3):
        torch._dynamo.reset()
        backend.clear()
        hf = tiny_hf("gemma3_text", num_hidden_layers=depth, layer_types=KINDS[:depth])
        ready: Any = with_cuda_graphs(wrap_model(hf), compiled=True)
        assert texts_of(ready, batch_size=1) == [generated(hf, prompt, 12) for prompt in PROMPTS]
        counts.append(backend.frame_count)
    assert counts[0] == counts[1] > 0, "more layers compile nothing more"
    assert texts_of(ready) == [generated(hf, prompt, 12) for prompt in PROMPTS]
    assert ready.decoder.modules.usable


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:dynamo_pgo")  # from torch
def test_generated_code_gives_the_text_of_generate():
    torch._dynamo.reset()
    hf = tiny_hf("llama")
    ready = with_cuda_graphs(wrap_model(hf), compiled=True)
    # no time for better machine code
    fast = {"cpp.vec_isa_ok": False, "aot_inductor.debug_compile": True}

    def alone() -> list[list[int]]:
        """Token by token: generated code for several would take as long again."""
        decoder = AutoregressiveDecoder(ready, GREEDY)
        return [text.tokens for text in decoder.generate(PROMPTS, 12, batch_size=1)]

    patched = inductor.patch({"force_disable_caches": True, **fast})
    with patched:
        got, codes = run_and_get_code(alone)
    assert got == [generated(hf, prompt, 12) for prompt in PROMPTS]
    layers = [code.partition("def call")[2] for code in codes]
    (code,) = (code for code in layers if len(re.findall(r"extern_kernels\.b?mm\(", code)) == 6)
    assert 3 < len(re.findall(r"^ +cpp_fused\w*\(", code, re.MULTILINE)) <= 9
    assert ".copy_(" not in code, "buffers are written in place"


def test_modules_that_cannot_be_compiled_run_as_they_are(monkeypatch: pytest.MonkeyPatch):
    def refuse(*_inputs: Any, **_named: Any) -> Any:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(torch, "compile", lambda _plain, **_: refuse)
    hf = tiny_hf("llama")
    ready = with_cuda_graphs(wrap_model(hf), compiled=True)
    with pytest.warns(SlowerWarning, match=r"the compiled pass failed \(no compiler\)") as warned:
        got = texts_of(ready, batch_size=1)
    assert got == [generated(hf, prompt, 12) for prompt in PROMPTS]
    assert len(warned) == 1


def late(mask_of: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A mask off by one: each token also sees the column after it."""
    return lambda *a, **named: mask_of(*a, **{**named, "q_offset": named["q_offset"] + 1})


def spoiled(read: Callable[..., Any]) -> Callable[..., Any]:
    """The first column is overwritten."""

    def spoil(layer: FixedLayer, keys: torch.Tensor, values: torch.Tensor, *a: Any) -> Any:
        visible = read(layer, keys, values, *a)
        if layer.columns_BN is not None:
            layer.values[:, :, 0] = 0
        return visible

    return spoil


def stale(read: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, cache, new, ends, **named: read(self, cache, new, ends - 1, **named)


@pytest.mark.parametrize(
    ("kind", "name", "mutant"), [(FixedPass, "logits", stale), (FixedLayer, "update", spoiled)]
)
def test_a_stale_length_and_an_overwritten_column_are_caught(
    kind: type, name: str, mutant: Any, monkeypatch: pytest.MonkeyPatch
):
    model = with_cuda_graphs(tiny_model())
    monkeypatch.setattr(kind, name, mutant(getattr(kind, name)))
    assert play(model).largest > 10 * EXACT


def test_a_mask_off_by_one_is_caught():
    model = with_cuda_graphs(tiny_model())
    assert play(model).largest < EXACT
    AttentionMaskInterface.register(attention.NAME, late(attention.mask_of))
    try:
        assert play(model).largest > 10 * EXACT
    finally:
        AttentionMaskInterface.register(attention.NAME, attention.mask_of)


def test_a_bfloat16_model_is_compared_as_closely_as_its_twin_allows():
    """Hidden columns have a small weight here, which the tolerance of bfloat16 lets through."""
    smooth = {"initializer_range": 0.05}
    ready = with_cuda_graphs(tiny_model(**smooth))

    def leaking(*given: Any, **named: Any) -> torch.Tensor:
        return attention.mask_of(*given, **named).clamp(-9)

    AttentionMaskInterface.register(attention.NAME, leaking)
    try:
        assert play(ready).largest < ROUNDED
        model = wrap_model(tiny_hf("llama", **smooth).to(torch.bfloat16))
        with pytest.warns(SlowerWarning, match=r"differ from .* \(allowed 0\.01\)"):
            assert with_cuda_graphs(model) is model
    finally:
        AttentionMaskInterface.register(attention.NAME, attention.mask_of)
