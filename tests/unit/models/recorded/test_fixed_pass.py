"""Passes over a cache of fixed size: compiled once for all layers, and wrong ones are not used.

The reference is transformers' pass over a whole text, without a cache.
"""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor import config as inductor
from torch._inductor.utils import run_and_get_code
from transformers import AttentionMaskInterface

from paceline.core.sampling import SamplingParams
from paceline.decode import SpeculativeDecoder
from paceline.errors import SlowerWarning
from paceline.models import wrap_model
from paceline.models.admission.model import OF_TWIN
from paceline.models.admission.trial import play
from paceline.models.prepare import with_cuda_graphs
from paceline.models.recorded import attention
from paceline.models.recorded.fixed_cache import FixedLayer
from paceline.models.recorded.fixed_pass import FixedPass
from support.models import tiny_hf, tiny_model

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


def generated(hf: Any) -> list[list[int]]:
    return [
        hf.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[0, len(prompt) :]
        for prompt in PROMPTS
    ]


@pytest.mark.slow
def test_layers_of_a_kind_share_one_function(
    backend: CompileCounterWithBackend, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("paceline.models.recorded.session._FEWEST_COLUMNS", 16)
    counts: list[int] = []
    for num_layers in (2, 4):
        torch._dynamo.reset()
        backend.clear()
        kinds = {"layer_types": ["sliding_attention", "full_attention"] * (num_layers // 2)}
        hf = tiny_hf("gemma3_text", num_hidden_layers=num_layers, **kinds)
        ready = with_cuda_graphs(wrap_model(hf), compiled=True)
        # widths of 16 and 32 columns, batches of 1 and 2 rows
        texts = [*texts_of(ready, batch_size=1), *texts_of(ready)]
        assert [list(map(int, text)) for text in texts] == [*map(list, generated(hf))] * 2
        counts.append(backend.frame_count)
    assert counts[0] == counts[1] > 0, "more layers compile nothing more"


@pytest.mark.slow
def test_so_do_those_of_a_decoder_with_sources(backend: CompileCounterWithBackend):
    counts: list[int] = []
    for num_layers in (3, 4):
        torch._dynamo.reset()
        backend.clear()
        model = tiny_model("t5", num_decoder_layers=num_layers)
        ready = with_cuda_graphs(model, compiled=True)
        plain = SpeculativeDecoder(model, model, gamma=3, sampling=GREEDY)
        wanted = [text.tokens for text in plain.generate(PROMPTS, 12, seed=1)]
        assert [*texts_of(ready, batch_size=1), *texts_of(ready)] == wanted * 2
        assert ready.decoder.modules.usable
        counts.append(backend.frame_count)
    assert counts[0] == counts[1] > 0, "more layers compile nothing more"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:dynamo_pgo")  # from torch
def test_generated_code_gives_the_text_of_generate(caplog: pytest.LogCaptureFixture):
    torch._dynamo.reset()
    hf = tiny_hf("llama")
    ready = with_cuda_graphs(wrap_model(hf), compiled=True)
    with caplog.at_level(logging.INFO, "paceline"), inductor.patch(force_disable_caches=True):
        got, codes = run_and_get_code(texts_of, ready, batch_size=1)
    assert got == [list(map(int, text)) for text in generated(hf)]
    assert "compiled a pass of llama over 1 x 4 tokens" in caplog.text
    layers = [code.partition("def call")[2] for code in codes]
    layers = [code for code in layers if len(re.findall(r"extern_kernels\.b?mm\(", code)) == 6]
    assert len(layers) == 2, "for one token and for several"
    for code in layers:
        assert 3 < len(re.findall(r"^ +cpp_fused\w*\(", code, re.MULTILINE)) <= 9
        assert ".copy_(" not in code, "buffers are written in place"


@pytest.mark.parametrize(
    ("spoiled", "fault"),
    [
        (lambda out: out.roll(1, -1), r"gives logits that differ by .* of their norm"),
        (lambda _out: 1 / 0, r"failed \(division by zero\)"),
    ],
)
def test_compiled_modules_that_compute_wrong_are_not_used(
    spoiled: Callable[[Any], Any], fault: str, monkeypatch: pytest.MonkeyPatch
):
    def compile_wrong(plain: Callable[..., Any], **_: Any) -> Callable[..., Any]:
        def run(*inputs: Any, **named: Any) -> Any:
            output = plain(*inputs, **named)
            return spoiled(output) if isinstance(output, torch.Tensor) else output

        return run

    monkeypatch.setattr(torch, "compile", compile_wrong)
    hf = tiny_hf("llama")
    ready = with_cuda_graphs(wrap_model(hf), compiled=True)
    with pytest.warns(SlowerWarning, match=f"the compiled pass {fault} for this llama") as warned:
        got = texts_of(ready, batch_size=1)
    assert got == [list(map(int, text)) for text in generated(hf)]
    assert len(warned) == 1


def late(mask_of: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A mask off by one: each token also sees the column after it."""
    return lambda *a, **named: mask_of(*a, **{**named, "q_offset": named["q_offset"] + 1})


def test_a_mask_off_by_one_is_caught():
    model = with_cuda_graphs(tiny_model())
    assert play(model).largest < OF_TWIN
    AttentionMaskInterface.register(attention.NAME, late(attention.mask_of))
    try:
        assert play(model).largest > 10 * OF_TWIN
    finally:
        AttentionMaskInterface.register(attention.NAME, attention.mask_of)


def test_padding_of_sources_that_is_seen_is_caught():
    model = with_cuda_graphs(tiny_model("t5"))
    assert play(model).largest < OF_TWIN
    AttentionMaskInterface.register(
        attention.NAME,
        lambda *a, **named: attention.mask_of(*a, **{**named, "attention_mask": None}),
    )
    try:
        assert play(model).largest > 10 * OF_TWIN
    finally:
        AttentionMaskInterface.register(attention.NAME, attention.mask_of)


def test_a_bias_that_is_the_same_for_all_rows_is_caught(monkeypatch: pytest.MonkeyPatch):
    def of_first(bias: Any, *sizes: Any, past_seen_tokens: Any, **named: Any) -> torch.Tensor:
        return bias(*sizes, past_seen_tokens=past_seen_tokens[:1], **named)

    monkeypatch.setattr("paceline.models.recorded.fixed_pass._bias_by_row", of_first)
    with pytest.warns(SlowerWarning, match="the recorded pass gives logits that differ"):
        model = with_cuda_graphs(tiny_model("t5"))
    assert not model.has_own_sessions


def test_a_stale_length_is_caught(monkeypatch: pytest.MonkeyPatch):
    model = with_cuda_graphs(tiny_model())
    read = FixedPass.logits
    monkeypatch.setattr(
        FixedPass, "logits", lambda self, cache, new, ends, **k: read(self, cache, new, ends - 1)
    )
    assert play(model).largest > 10 * OF_TWIN


def test_an_overwritten_column_is_caught(monkeypatch: pytest.MonkeyPatch):
    model = with_cuda_graphs(tiny_model())
    update = FixedLayer.update

    def spoil(layer: FixedLayer, keys: torch.Tensor, values: torch.Tensor, *a: Any) -> Any:
        visible = update(layer, keys, values, *a)
        if layer.columns_BN is not None:
            layer.values[:, :, 0] = 0
        return visible

    monkeypatch.setattr(FixedLayer, "update", spoil)
    assert play(model).largest > 10 * OF_TWIN
