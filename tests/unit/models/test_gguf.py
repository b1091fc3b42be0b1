"""GGUF files: converted once, whole or not at all, and one clear line for a damaged one."""

import errno
import importlib.util
import json
import os
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from paceline.errors import StorageError
from paceline.models import load_model, wrap_model
from paceline.models.compatibility import check_same_vocabulary
from paceline.models.gguf.conversion import converted_gguf
from paceline.models.inspection import inspect_model
from paceline.models.loading import load_tokenizer
from support.checkpoints import fails
from support.gguf_files import F16, F32, Q8_0, tiny_vocabulary, write_gguf
from support.models import tiny_hf, tiny_tokenizer

TEXT = [5, 9, 3, 7, 11, 20]


@pytest.fixture
def hf() -> PreTrainedModel:
    return tiny_hf("llama", vocab_size=266, intermediate_size=64)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def gguf_file(tmp_path: Path, hf: PreTrainedModel) -> Path:
    return write_gguf(tmp_path / "tiny.gguf", hf)


def entries(tmp_path: Path) -> list[str]:
    """What lies in the cache but for locks."""
    cache = tmp_path / "cache" / "gguf"
    names = [path.name for path in cache.iterdir()] if cache.exists() else []
    return [name for name in names if not name.endswith(".lock")]


def logits_of(hf: PreTrainedModel) -> torch.Tensor:
    with torch.inference_mode():
        return hf(input_ids=torch.tensor([TEXT])).logits


def test_a_gguf_file_gives_the_model_it_was_made_from(gguf_file: Path, hf: PreTrainedModel):
    model = load_model(gguf_file, dtype="float32")
    torch.testing.assert_close(logits_of(model.hf), logits_of(hf), rtol=1e-4, atol=1e-4)
    assert model.eos_token_ids == (1,)
    assert model.tokenizer is not None
    text = "the theatre in Zürich"
    assert model.tokenizer.encode(text) == tiny_tokenizer().encode(text)
    assert load_tokenizer(gguf_file).encode(text) == tiny_tokenizer().encode(text)
    # transformers adds an <|endoftext|> that has no logit to every tokenizer it takes from GGUF
    assert check_same_vocabulary(model, wrap_model(hf, tiny_tokenizer())) == 266


def angles(path: Path) -> torch.Tensor:
    """Frequencies of the rotary positions, as the modules of transformers compute them."""
    hf: Any = load_model(path, dtype="float32").hf
    return hf.model.rotary_emb.inv_freq * hf.model.rotary_emb.attention_scaling


# 1 below a wavelength of 16, 8 above 64, and between them a mixture, by hand
FACTORS = [1.0, 1 / ((1 - 0.00619779) / 8 + 0.00619779), 8.0, 8.0]


def with_factors(path: Path, hf: Any, factors: list[float], name: str = "rope_freqs") -> Path:
    return write_gguf(path, hf, tensors={f"{name}.weight": np.array(factors, np.float32)})


def test_factors_of_frequencies_are_those_of_the_model(tmp_path: Path, hf: Any):
    path = with_factors(tmp_path / "a.gguf", hf, FACTORS)
    wanted = torch.tensor([10_000 ** (-pair / 4) / FACTORS[pair] for pair in range(4)])
    torch.testing.assert_close(angles(path), wanted, rtol=1e-5, atol=0)
    assert not torch.equal(logits_of(load_model(path, dtype="float32").hf), logits_of(hf))


def test_other_factors_are_refused(tmp_path: Path, hf: Any):
    other = [1.0, 1.25, 3.0, 2.5]
    fails(with_factors(tmp_path / "a.gguf", hf, other), "rope_freqs.weight", "not Llama 3's")
    long = with_factors(tmp_path / "b.gguf", hf, other, "rope_factors_long")
    fails(long, "rope.scaling.type = longrope", "safetensors")


def test_linear_scaling_divides_all_frequencies(tmp_path: Path, hf: Any):
    scaled = {"rope__scaling__type": "linear", "rope__scaling__factor": 4.0}
    wanted = torch.tensor([10_000 ** (-pair / 4) / 4 for pair in range(4)])
    path = write_gguf(tmp_path / "a.gguf", hf, **scaled)
    torch.testing.assert_close(angles(path), wanted)
    for model in (load_model(path), inspect_model(path)):
        assert model.max_length == 64  # context_length of the file, as n_ctx_train of llama.cpp
    older = write_gguf(tmp_path / "b.gguf", hf, rope__scale_linear=4.0)
    torch.testing.assert_close(angles(older), wanted)
    none = write_gguf(tmp_path / "c.gguf", hf, **scaled | {"rope__scaling__type": "none"})
    torch.testing.assert_close(angles(none), 4 * wanted)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention__scale", 0.3),
        ("attn_logit_softcapping", 30.0),
        ("logit_scale", 4.0),
        ("attention__sliding_window", 8),
        ("rope__freq_base_swa", 500.0),
        ("rope__scaling__type", "spiral"),
        ("expert_count", 8),
        ("rope__scaling__attn_factor", 1.5),
        ("rope__dimension_sections", 3),
        ("attention__value_length", 4),
        ("something__new", "yes"),
    ],
)
def test_a_key_that_is_not_used_is_refused_by_name(key: str, value: Any, tmp_path: Path, hf: Any):
    path = write_gguf(tmp_path / "a.gguf", hf, **{key: value})
    found = "keys of 8 and values of 4" if "length" in key else key.replace("__", ".")
    fails(path, found)
    assert entries(tmp_path) == []


def test_notes_of_an_author_and_values_that_change_nothing_are_read(tmp_path: Path, hf: Any):
    neutral = {"logit_scale": 1.0, "attention__sliding_window": 4096, "expert_count": 0}
    neutral |= {"rope__scaling__finetuned": 0}

    def noted(key: str) -> Path:
        def add(writer: gguf.GGUFWriter) -> None:
            tiny_vocabulary(writer)
            writer.add_string(key, "x")

        return write_gguf(tmp_path / f"{key}.gguf", hf, vocabulary=add, **neutral)

    found = load_model(noted("mradermacher.quantized_by"), dtype="float32").hf
    torch.testing.assert_close(logits_of(found), logits_of(hf), rtol=1e-4, atol=1e-4)
    fails(noted("tokenizer.ggml.banana"), "tokenizer.ggml.banana")


@pytest.mark.parametrize("name", ["blk.0.attn_q_norm.weight", "rope_other.weight"])
def test_a_tensor_without_a_place_is_refused_by_name(name: str, tmp_path: Path, hf: Any):
    fails(write_gguf(tmp_path / "a.gguf", hf, tensors={name: np.ones(8, np.float32)}), name)


def test_biases_are_read_and_a_bias_that_is_not_there_is_zero(tmp_path: Path, hf: Any):
    bias = np.linspace(-1, 1, 32, dtype=np.float32)
    more = {"blk.0.attn_output.bias": bias, "blk.1.ffn_down.bias": bias}
    found: Any = load_model(
        write_gguf(tmp_path / "a.gguf", hf, tensors=more),
        dtype="float32",
    ).hf
    state = found.state_dict()
    for name in ("0.self_attn.o_proj", "1.mlp.down_proj"):
        assert state[f"model.layers.{name}.bias"].tolist() == bias.tolist()
    for name in ("1.self_attn.o_proj", "0.self_attn.q_proj", "0.mlp.down_proj"):
        assert not state[f"model.layers.{name}.bias"].any()


@pytest.mark.parametrize(
    ("file_type", "stored"), [(F32, "float32"), (F16, "float16"), (Q8_0, "bfloat16")]
)
def test_plain_files_keep_their_precision_and_quantised_ones_become_bfloat16(
    tmp_path: Path,
    hf: PreTrainedModel,
    file_type: int,
    stored: str,
):
    entry = converted_gguf(write_gguf(tmp_path / "tiny.gguf", hf, file_type=file_type))
    config = json.loads((entry / "config.json").read_text())
    assert config["dtype"] == stored
    assert "quantization_config" not in config


def test_a_file_is_converted_once_and_again_if_it_changes(
    gguf_file: Path, hf: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
):
    first, before = load_model(gguf_file, dtype="float32"), converted_gguf(gguf_file)
    with monkeypatch.context() as patch:
        patch.setattr("paceline.models.gguf.conversion.convert_gguf", None)
        second = load_model(gguf_file, dtype="float32")
    assert torch.equal(first.head_weight, second.head_weight)
    with torch.no_grad():
        hf.lm_head.weight.add_(1.0)
    write_gguf(gguf_file, hf)
    os.utime(gguf_file, ns=(1, 1))
    assert converted_gguf(gguf_file) != before


def test_a_conversion_that_fails_leaves_nothing(
    gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    whole = PreTrainedModel.save_pretrained

    def half(self: PreTrainedModel, path: Path, **kwargs: object) -> None:
        whole(self, path, **kwargs)  # pyright: ignore[reportArgumentType]
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", half)
    fails(gguf_file, "the disk is full", error=StorageError)
    assert entries(tmp_path) == []
    monkeypatch.undo()
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    assert load_model(gguf_file).vocab_size == 266


def test_two_at_once_make_one_entry(gguf_file: Path, tmp_path: Path):
    with ThreadPool(2) as pool:
        found = pool.map(converted_gguf, [gguf_file] * 2, chunksize=1)
    assert found[0] == found[1]
    assert entries(tmp_path) == [found[0].name]


@pytest.mark.parametrize("keep", [0, 20, 30_000])
def test_a_cut_file_is_refused(gguf_file: Path, tmp_path: Path, keep: int):
    gguf_file.write_bytes(gguf_file.read_bytes()[:keep])
    fails(gguf_file, "cannot be read as a GGUF file", "download it again")
    assert entries(tmp_path) == []


@pytest.mark.parametrize("arch", ["falcon", "martian"])
def test_another_family_is_refused_by_name(arch: str, tmp_path: Path, hf: PreTrainedModel):
    path = write_gguf(tmp_path / "strange.gguf", hf, arch=arch)
    fails(path, f"architecture '{arch}'", "use the model's safetensors directory")


def test_without_the_gguf_package_one_line_says_what_to_install(
    gguf_file: Path, monkeypatch: pytest.MonkeyPatch
):
    find = importlib.util.find_spec
    without = {"gguf": lambda *_: None}
    monkeypatch.setattr(importlib.util, "find_spec", lambda n, *a: without.get(n, find)(n, *a))
    fails(gguf_file, "pip install -e '.[gguf]'")


SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
RMS = "attention__layer_norm_rms_epsilon"
EXPERTS = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 16}
WIDTHS = {"attention__key_length": 16, "attention__value_length": 16}
CAPS = {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    # architecture -> model_type, settings, keys
    "granite": (
        "granite",
        {"attention_multiplier": 0.3, "residual_multiplier": 0.7, "logits_scaling": 3.0},
        {RMS: 1e-6, "attention__scale": 0.3, "residual_scale": 0.7, "logit_scale": 3.0},
    ),
    "gemma2": (
        "gemma2",
        {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8, **CAPS},
        {RMS: 1e-6, **WIDTHS, **CAPS, "attention__sliding_window": 8},
    ),
    "phi3": ("phi3", {}, {RMS: 1e-5}),
    "qwen3moe": (
        "qwen3_moe",
        MOE | {"norm_topk_prob": True, "head_dim": 16},
        {RMS: 1e-6, **EXPERTS, **WIDTHS},
    ),
    "gemma3": (
        "gemma3_text",
        {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8},
        {RMS: 1e-6, **WIDTHS, "attention__sliding_window": 8, "rope__freq_base": 1e6},
    ),
}


def stored(name: str, weight: np.ndarray, arch: str) -> np.ndarray:
    """A weight as llama.cpp's converter stores it; 4 heads, 2 of keys and values."""
    if arch == "granite" and (".q_proj." in name or ".k_proj." in name):
        heads = 4 if ".q_proj." in name else 2
        halves = weight.reshape(heads, 2, -1, weight.shape[1])
        return halves.swapaxes(1, 2).reshape(weight.shape)
    return weight + 1 if arch.startswith("gemma") and name.endswith("norm.weight") else weight


def write_family(path: Path, hf: Any, arch: str, keys: dict[str, Any]) -> Path:
    writer = gguf.GGUFWriter(path, arch)
    writer.add_file_type(0)
    sizes = {"context_length": 64, "embedding_length": 32, "block_count": 4}
    sizes |= {"feed_forward_length": 48, "attention__head_count": 4, "attention__head_count_kv": 2}
    for name, value in (sizes | keys).items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add(f"{arch}.{name.replace('__', '.')}", value)
    tiny_vocabulary(writer)
    archs = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(archs[arch], 4)
    for name, weight in hf.state_dict().items():
        if name == "lm_head.weight" and hf.config.tie_word_embeddings:
            continue
        array = stored(name, weight.numpy(), arch)
        if name.endswith("gate_up_proj"):
            for part, half in zip(("gate", "up"), np.split(array, 2, 1), strict=True):
                writer.add_tensor(
                    f"blk.{name.split('.')[2]}.ffn_{part}_exps.weight", np.ascontiguousarray(half)
                )
            continue
        label = names.get_name(name, (".weight", ".bias"))
        assert label is not None
        label += "" if label.endswith((".weight", ".bias")) else ".weight"
        writer.add_tensor(label, np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.filterwarnings("ignore:with sdpa attention")  # Gemma 2, up to transformers 5.20
@pytest.mark.parametrize("arch", CASES)
def test_a_file_computes_what_its_model_computes(arch: str, tmp_path: Path):
    """Layouts and keys are those of llama.cpp's converter."""
    model_type, settings, keys = CASES[arch]
    roles = {"vocab_size": 266, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}
    config = AutoConfig.for_model(model_type, **SIZES | roles | settings)
    config.initializer_range = 0.3
    torch.manual_seed(0)
    eager = "eager" if getattr(config, "attn_logit_softcapping", None) else None
    hf: Any = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation=eager
    )
    for weight in hf.eval().parameters():
        if weight.ndim == 1:
            torch.nn.init.normal_(weight, mean=0.5, std=0.2)
    read = load_model(write_family(tmp_path / "a.gguf", hf, arch, keys), dtype="float32")
    tokens = torch.tensor([[number * 37 % 260 for number in range(40)]])
    with torch.inference_mode():
        wanted, found = hf(tokens).logits, read.hf(tokens).logits
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
