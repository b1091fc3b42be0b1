"""Heads of models that scale or cap their logits, against the logits of transformers."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from paceline.core.fused import Head
from paceline.errors import UnsupportedModelError
from paceline.models import wrap_model
from paceline.models.hf.base import recorded_hidden_states
from paceline.models.hf.logit_map import LogitMap, logit_map
from support.models import CONFIGS, ENCODER_DECODERS, LLAMA_LIKE, SCALED, tiny_hf

TEXT = [5, 6, 7, 9, 12, 30, 4, 4, 21]


def wanted_and_got(hf: PreTrainedModel) -> tuple[Tensor, Tensor]:
    """Logits of a text by transformers, and by the head from hidden states."""
    model: Any = wrap_model(hf)
    batch = model.trial_batch(TEXT)
    with torch.no_grad():
        return model.plain_logits(batch), model.head.logits(model.hidden(batch))


@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [
        *product([*SCALED, *CONFIGS, *ENCODER_DECODERS], [torch.float32]),
        *product([*SCALED, "llama", "t5", "marian"], [torch.bfloat16]),
    ],
    ids=str,
)
def test_the_head_makes_the_logits_of_transformers(architecture: str, dtype: torch.dtype):
    hf = tiny_hf(architecture).to(dtype)
    cap = getattr(hf.config, "final_logit_softcapping", None)
    assert logit_map(hf).cap == cap
    wanted, got = wanted_and_got(hf)
    assert cap is None or float(wanted.abs().max()) > 0.9 * cap, "the cap changes these logits"
    apart = 1e-5 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(got, wanted, rtol=0, atol=apart * float(wanted.abs().max()))


def test_a_body_under_another_name_than_the_class_says():
    sizes: dict[str, Any] = {"num_local_experts": 2, "intermediate_size_mlp": 48}
    config = AutoConfig.for_model("llama4_text", vocab_size=61, **LLAMA_LIKE, **sizes)
    hf: Any = AutoModelForCausalLM.from_config(config).eval()
    assert hf.base_model is hf
    wanted, got = wanted_and_got(hf)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cap", [0.5, 4.0, 30.0, 50.0])
def test_a_cap_is_found_that_small_logits_do_not_reach(cap: float):
    hf = tiny_hf("gemma2", final_logit_softcapping=cap, initializer_range=0.02)
    model = wrap_model(hf)
    assert model.head.cap == pytest.approx(cap, rel=1e-6)
    with torch.no_grad():
        hf.get_output_embeddings().weight *= 100  # pyright: ignore
    wanted, got = wanted_and_got(hf)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("architecture", "scale"), [("granite", 1 / 0.3), ("cohere2", 2.5)])
def test_a_bias_of_the_head_is_scaled_with_its_product(architecture: str, scale: float):
    hf = tiny_hf(architecture)
    assert logit_map(hf).output_scale == pytest.approx(scale, rel=1e-6)
    assert logit_map(tiny_hf("minicpm3")).input_scale == pytest.approx(8 / 32)
    head: Any = hf.get_output_embeddings()
    head.bias = nn.Parameter(torch.linspace(-1, 1, 61))
    wanted, got = wanted_and_got(hf)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("architecture", ["gemma2", "granite", "cohere", "minicpm3"])
def test_recorded_states_are_those_that_the_head_reads(architecture: str):
    model = wrap_model(tiny_hf(architecture))
    with recorded_hidden_states(model) as recorded, torch.no_grad():
        logits_NV = model.start_session().prefill([TEXT])
        got = model.head.logits(recorded[0])[0, -1:]
    torch.testing.assert_close(got, logits_NV, rtol=1e-5, atol=1e-5)


UNKNOWN = {
    "clamped": lambda logits: logits.clamp(max=5.0),
    "another bend": lambda logits: 5 * torch.sin(logits / 5),
    "normalised": lambda logits: logits.log_softmax(-1),
    "one token only": lambda logits: logits * torch.linspace(1, 2, logits.shape[-1]),
    "scaled behind the cap": lambda logits: 2 * torch.tanh(logits) + 0.1 * logits,
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_any_other_function_is_refused_by_name(name: str):
    hf = tiny_hf()

    def change(_hf: nn.Module, _inputs: object, output: Any) -> None:
        output.logits = UNKNOWN[name](output.logits)

    hf.register_forward_hook(change)
    model = wrap_model(hf)
    with pytest.raises(UnsupportedModelError, match="llama computes logits from hidden states in"):
        _ = model.head


def test_a_head_that_reads_something_else_is_refused():
    hf = tiny_hf()
    head: Any = hf.get_output_embeddings()
    head.register_forward_pre_hook(lambda _head, inputs: (inputs[0].relu(),))
    with pytest.raises(UnsupportedModelError, match="which only decoding supports"):
        _ = wrap_model(hf).head


@pytest.mark.parametrize(
    ("architecture", "name", "mutant"),
    [
        ("gemma2", "capped", staticmethod(lambda values, _cap: values)),
        ("nanochat", "capped", staticmethod(lambda x, cap: cap * (x / cap).tanh().tanh())),
        ("granite", "scaled", lambda _self, hidden: hidden),
        ("minicpm3", "scaled", lambda self, hidden: self.output_scale * hidden),
        ("cohere", "scaled", lambda self, hidden: self.output_scale**2 * hidden),
    ],
    ids=["cap dropped", "cap twice", "scale dropped", "input scale dropped", "scale twice"],
)
def test_mutants_are_caught_by_the_comparison(
    architecture: str, name: str, mutant: Any, monkeypatch: pytest.MonkeyPatch
):
    hf = tiny_hf(architecture)
    logit_map(hf)  # measured by the code without the fault
    monkeypatch.setattr(Head if name == "capped" else LogitMap, name, mutant)
    wanted, got = wanted_and_got(hf)
    assert float((wanted - got).abs().max()) > 0.1 * float(wanted.abs().max())
