"""A fast path that reads wrong is dropped, with one warning; one that reads right is used."""

from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.errors import SlowerWarning
from paceline.models import prepare_for_decoding, wrap_model
from paceline.models.admission import model as results
from paceline.models.admission.trial import Comparison
from paceline.models.llama.cpu import NativeLlama
from paceline.models.prepare import training_writer, with_cuda_graphs
from paceline.models.recorded.fixed_pass import FixedPass
from paceline.models.recorded.session import GraphSession
from paceline.native import compiled
from support.models import tiny_hf

has_compiler = pytest.mark.skipif(compiled() is None, reason="no C compiler with OpenMP")


def in_16_bits(architecture: str, dtype: torch.dtype = torch.float32) -> Any:
    return wrap_model(tiny_hf(architecture).bfloat16().to(dtype))


def difference(wanted: torch.Tensor, got: torch.Tensor) -> float:
    comparison = Comparison()
    comparison.add(wanted, got, "here")
    return comparison.largest


def test_the_difference_is_counted_in_deviations_of_the_logits():
    wanted = torch.tensor([[1.0, -1.0, 1.0, -1.0]])
    deviation = (4 / 3) ** 0.5
    assert difference(wanted, wanted + 0.25) == pytest.approx(0.25 / deviation, rel=1e-5)
    limited = torch.tensor([[1.0, -torch.inf, 1.5, -1.0]])
    assert difference(wanted, limited) == pytest.approx(0.5 / deviation, rel=1e-5)
    assert difference(wanted, torch.full_like(wanted, torch.nan)) == torch.inf


@has_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_compiled_pass_that_reads_wrong_is_not_used(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
):
    model = in_16_bits("llama", dtype)
    assert prepare_for_decoding(model) is not model
    read = NativeLlama.__call__
    monkeypatch.setattr(NativeLlama, "__call__", lambda *a: read(*a).flip(-1))
    with pytest.warns(SlowerWarning, match="the compiled pass gives logits that differ"):
        assert prepare_for_decoding(model) is model


def test_recorded_passes_that_read_wrong_or_fail_are_not_used(monkeypatch: pytest.MonkeyPatch):
    model = in_16_bits("llama")
    assert isinstance(with_cuda_graphs(model).start_session(), GraphSession)
    logits = FixedPass.logits
    monkeypatch.setattr(FixedPass, "logits", lambda *a, **k: logits(*a, **k).flip(-1))
    with pytest.warns(SlowerWarning, match="the recorded pass gives logits that differ"):
        assert with_cuda_graphs(model) is model
    monkeypatch.setattr(FixedPass, "logits", None)
    with pytest.warns(SlowerWarning, match="the recorded pass failed .*callable"):
        assert with_cuda_graphs(model) is model


@has_compiler
def test_a_copy_of_a_model_in_training_that_reads_wrong_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
):
    model = wrap_model(tiny_hf("llama"))
    wanted = model.start_session().prefill([[5]])
    assert not torch.equal(training_writer(model).start_session().prefill([[5]]), wanted), "rounded"
    read = NativeLlama.__call__
    monkeypatch.setattr(NativeLlama, "__call__", lambda *a: read(*a).flip(-1))
    writing = training_writer(model)
    with pytest.warns(SlowerWarning, match="copy of a model in training gives logits that differ"):
        session = writing.start_session()
    assert torch.equal(session.prefill([[5]]), wanted)
    assert torch.equal(writing.start_session().prefill([[5]]), wanted), "checked once, not again"


@has_compiler
def test_a_stale_window_in_the_configuration_is_caught_by_the_twin(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """Llama ignores `sliding_window`; texts of the model itself are too short to show it."""
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    hf = tiny_hf("llama", max_position_embeddings=8192).bfloat16().float()
    hf.config.sliding_window = 4096
    model = wrap_model(hf)
    assert prepare_for_decoding(model) is not model
    monkeypatch.setattr(results, "_known", {})
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "again"))
    monkeypatch.setattr(
        "paceline.models.llama.cpu_weights.window_of", lambda each: each.config.sliding_window
    )
    with pytest.warns(SlowerWarning, match="the compiled pass gives logits that differ"):
        assert prepare_for_decoding(model) is model
