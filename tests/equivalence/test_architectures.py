"""Classes that docs/architectures.md lists as equal still give the texts of generate().

`make test` covers one class for each way of computing that changes sessions: kinds of positions,
windows, caches, experts, states, and decoders used alone, with shorter texts than the document.
Llama, GPT-2, T5 and BART are compared with the pass of transformers elsewhere: their sessions in
tests/property/test_session.py, as those of CONFIGS and ENCODER_DECODERS, and on two devices in
tests/unit/models/test_spreading.py.
All classes are compared by `tools/golden/record_architectures.py --check`, which takes minutes.
"""

from typing import Any

import pytest
import transformers
from record_architectures import (
    AMBIGUOUS,
    DOCUMENT,
    EQUAL,
    WITHOUT_CACHE,
    Architecture,
    architectures,
    document,
    recorded,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gemma2.modeling_gemma2 import Gemma2PreTrainedModel

from paceline.models import wrap_model
from paceline.models.admission.twin import tiny_twin
from support.devices import NamedDevices, halves, spread
from support.models import CONFIGS, ENCODER_DECODERS

CAUSAL = {
    "gptj": "RoPE of a part of each head",
    "opt": "learned positions with an offset, computed from the mask",
    "bloom": "ALiBi, from the mask",
    "bart": "positions from the length of the cache, no argument for them",
    "xglm": "sinusoidal positions",
    "bert": "an encoder that reads as a decoder",
    "gemma3_text": "windows in some layers, two RoPEs",
    "gpt_oss": "windows, sinks and experts",
    "cohere2": "layers without positions, a scale of logits",
    "llama4_text": "chunks, in layers with positions",
    "deepseek_v3": "compressed keys, experts in some layers",
    "mamba": "a state",
    "qwen3_next": "linear attention beside full attention",
    "lfm2": "convolutions beside full attention",
}
SEQ2SEQ = {
    "marian": "sinusoidal positions",
    "m2m_100": "sinusoidal positions behind that of the padding token",
}
CHOSEN = {(name, seq2seq) for seq2seq, part in ((False, CAUSAL), (True, SEQ2SEQ)) for name in part}
FOUND = [each for each in architectures() if each in CHOSEN]
TEXTS = [each for each in FOUND if each.model_type not in (CONFIGS, ENCODER_DECODERS)[each[1]]]
# kinds of positions, windows, compressed keys and states
SPREAD = ("gptj", "bloom", "gemma3_text", "deepseek_v3", "mamba", "qwen3_next", "marian")

of_this_version = pytest.mark.skipif(
    f"transformers {transformers.__version__}," not in DOCUMENT.read_text("utf-8"),
    reason="the document belongs to another version of transformers",
)


def test_no_class_is_wrong():
    known = {*EQUAL.values(), WITHOUT_CACHE, AMBIGUOUS, "refused", "no tiny configuration"}
    assert {row.kind for row in recorded()} <= known


def test_attention_that_ignores_a_cap_is_named(monkeypatch: pytest.MonkeyPatch):
    """As SDPA for Gemma 2 in transformers 5.20 and earlier."""

    def without_cap(*given: Any, softcap: float | None = None, **others: Any) -> Any:
        return sdpa_attention_forward(*given, **others)

    monkeypatch.setattr(Gemma2PreTrainedModel, "_supports_sdpa", True)
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", without_cap)
    row = Architecture("gemma2").row()
    assert row.kind == AMBIGUOUS
    assert row.result.endswith("with eager attention")


def test_positions_of_generate_that_are_others_are_named():
    row = Architecture("camembert").row()
    assert row.kind == AMBIGUOUS
    assert row.result.endswith("with the positions that generate() gives to a text")


@of_this_version
def test_every_class_has_a_row():
    listed = [row[:2] for row in recorded()]
    assert listed == [(each.model_type, each.class_name) for each in architectures()]


@of_this_version
def test_the_document_is_what_the_script_writes():
    counted = document(recorded()).partition("| result |")[2]
    assert counted == DOCUMENT.read_text("utf-8").partition("| result |")[2]


@pytest.mark.slow
@pytest.mark.parametrize("architecture", TEXTS, ids=lambda each: each.class_name)
def test_a_class_that_was_equal_is_equal(architecture: Architecture):
    results = {row[:2]: row.result for row in recorded()}
    listed = results[architecture.model_type, architecture.class_name]
    assert listed in EQUAL.values(), "choose a class that is listed as equal"
    assert architecture.row(num_new=10, gammas=(4,)).result == listed


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The following device_map keys")  # a buffer of BART
@pytest.mark.parametrize(
    "architecture",
    [each for each in FOUND if each.model_type in SPREAD],
    ids=lambda each: each.class_name,
)
def test_a_class_is_equal_on_two_devices(architecture: Architecture):
    """Loading compares its sessions with the pass of transformers over each text."""
    hf = tiny_twin(architecture.in_full_size())
    assert hf is not None
    with NamedDevices():
        spread(hf, halves(hf), ("cpu:1", "cpu:2"))
        prompt = (2,) if architecture.encoder_decoder else None
        model = wrap_model(hf, decoder_prompt=prompt)
    results = {row[:2]: row.result for row in recorded()}
    assert EQUAL[model.sessions] == results[architecture.model_type, architecture.class_name]
