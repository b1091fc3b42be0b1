"""GGUF files: converted once, whole or not at all, and one clear line for a damaged one.

Tokenizers are read as llama.cpp reads them, which gave all ids and stop tokens of `SPLITS` and
`ENDS` for these very files: the server of xllamacpp 2026.10.11549 (/tokenize with parse_special;
the log for stop tokens).
"""

import errno
import importlib.util
import json
import os
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from paceline.errors import StorageError
from paceline.models import load_model, wrap_model
from paceline.models.compatibility import check_same_vocabulary
from paceline.models.gguf.conversion import converted_gguf
from paceline.models.inspection import inspect_model
from paceline.models.loading import load_tokenizer
from support.checkpoints import fails
from support.gguf_files import F16, F32, Q8_0, TEXTS, TOKENS, tiny_vocabulary, write_gguf, written
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


def test_memory_that_runs_out_is_no_fault_of_the_file(
    gguf_file: Path, monkeypatch: pytest.MonkeyPatch
):
    said = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"
    monkeypatch.setattr(PreTrainedModel, "save_pretrained", Mock(side_effect=RuntimeError(said)))
    with pytest.raises(RuntimeError, match="allocate 9 bytes"):
        load_model(gguf_file)


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
    fails(gguf_file, "pip install 'gguf>=")


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


SPLITS = (  # by text: the ids that any rule gives
    (
        "256 6 82 290 6 50 220 296 299 22 220 304 220 3 18 13 281 283 87 63",
        "256 258 290 6 50 265 267 269 271 273 275 277 18 13 281 283 87 63",
        "256 258 290 6 50 220 16 17 18 19 20 21 22 273 275 277 18 13 16 19 283 87 63",
        "256 258 290 263 220 296 299 22 332 277 18 13 281 283 87 63",
        "256 258 290 263 220 16 17 18 19 20 21 22 273 275 277 18 13 16 19 283 87 63",
        "256 258 290 263 220 16 17 18 19 20 21 22 332 277 18 13 16 19 283 87 63",
    ),
    (
        "64 220 533 547 537 197 197 67 555",
        "64 220 533 535 220 537 197 540 555",
    ),
    (
        "87 629 631 16 634 636 636 639 88 62 89",
        "87 629 631 16 634 651 198 639 88 62 89",
        "87 659 16 691 639 88 642",
        "87 629 631 16 634 636 636 639 88 642",
        "87 659 16 714 88 642",
    ),
    (
        "748 750 752 788 757 759 795 83 765 767 803 772 774 776 812 778 6 82",
        "748 750 752 788 757 759 795 83 765 767 803 772 774 776 812 778 258",
        "977 826 830 933 1058 258",
        "748 750 752 788 757 759 761 763 765 767 803 772 774 776 812 778 258",
        "977 826 830 834 803 1058 258",
    ),
    (
        "1087 1089 1091 1125 1128 1099 1101 1103 1137 1107 1109 1111 11 1114 1116 1118",
        "1296 1305 1314 1268",
        "1087 1089 1091 1125 1096 1098 1100 1134 1096 1106 1108 1143 1113 1115 1150",
    ),
    (
        "68 1395 68 1395 1398 1400 1426 1429 1432 1435 1406 1412 1442 1413 1415",
        "68 1418 1395 1615 1519 1655",
        "68 1418 1395 1398 1400 1426 1429 1432 1435 1406 1412 1442 1413 1415",
    ),
    (
        "1678 1680 1682 1684 1686 1688 1690 1692 1694 1718 1698 86",
        "1763 1684 1841 1718 1721",
        "1678 1680 1682 1684 1686 1688 1690 1692 1694 1718 1721",
        "1678 1680 1682 1684 1841 1718 1721",
    ),
)
RULES = {  # by pre-tokenizer: which of them each text has; "": the key is missing
    "": (0, 0, 0, 0, 0, 0, 0),
    "gpt-2": (1, 0, 1, 1, 0, 0, 0),
    "smollm": (2, 0, 1, 1, 0, 0, 0),
    "llama-bpe": (3, 1, 2, 2, 1, 1, 1),
    "qwen2": (4, 1, 3, 3, 2, 2, 2),
    "tekken": (5, 1, 4, 4, 1, 1, 3),
}
CONTROL, USER_DEFINED, NORMAL, UNUSED = 3, 4, 1, 5  # types of tokens


def ids_of(path: Path, *texts: str) -> list[list[int]]:
    """Ids of transformers; those of tokenizers alone are the same."""
    tokenizer: Any = load_tokenizer(path)
    found = [tokenizer(text)["input_ids"] for text in texts]
    alone = Tokenizer.from_file(str(converted_gguf(path) / "tokenizer.json"))
    assert [alone.encode(text).ids for text in texts] == found
    return found


@pytest.mark.parametrize("pre", RULES)
def test_text_is_split_as_llama_cpp_splits_it(pre: str, tmp_path: Path):
    ends = {"bos_token_id": len(TOKENS), "add_bos_token": False}
    path = written(tmp_path / "a.gguf", pre=pre or None, **ends)
    chosen = zip(SPLITS, RULES[pre], strict=True)
    wanted = [[*map(int, splits[number].split())] for splits, number in chosen]
    assert ids_of(path, *TEXTS) == wanted


@pytest.mark.parametrize(
    ("key", "name", "said"),
    [
        *(("pre", name, "pre-tokenizer") for name in ("kimi-k2", "deepseek-v3", "falcon", "new")),
        *(("tokenizer_model", name, "tokenizer of the kind") for name in ("t5", "plamo2")),
    ],
)
def test_a_tokenizer_without_a_rule_is_refused_by_its_name(
    key: str, name: str, said: str, tmp_path: Path
):
    fails(written(tmp_path / "a.gguf", **{key: name}), f"{said} '{name}'")


SPECIAL = {
    "<\uff5cbegin\u2581of\u2581sentence\uff5c>": CONTROL,
    "<\uff5cend\u2581of\u2581sentence\uff5c>": CONTROL,
    "<\uff5cUser\uff5c>": CONTROL,
    "[größe]": CONTROL,
    "  \t": USER_DEFINED,
    "[плюс]": USER_DEFINED,
}


def test_each_special_token_is_its_own_id_and_none_is_added(tmp_path: Path):
    path = written(tmp_path / "a.gguf", special=SPECIAL)
    first = len(TOKENS)
    model = load_model(path)
    assert ids_of(path, *SPECIAL) == [[first + number] for number in range(len(SPECIAL))]
    assert ids_of(path, "[größe]e[плюс]  \t") == [
        [first + 3, TOKENS.index("e"), first + 5, first + 4]
    ]
    assert model.tokenizer is not None
    assert len(model.tokenizer) == model.vocab_size == first + len(SPECIAL)
    assert model.tokenizer.decode([first + 5]) == "[плюс]"
    shown = model.tokenizer.decode([first + 2, 5, first + 4], skip_special_tokens=True)
    assert shown == TOKENS[5] + "  \t"  # control tokens are no text, user-defined ones are


def test_rows_of_the_embedding_without_a_token_are_no_tokens(tmp_path: Path):
    padding = {f"[PAD{len(TOKENS) + number}]": UNUSED for number in (1, 2)}
    model = load_model(written(tmp_path / "a.gguf", special={"<|endoftext|>": CONTROL} | padding))
    assert (model.vocab_size, model.hf.config.vocab_size) == (len(TOKENS) + 1, len(TOKENS) + 3)


ENDS = {  # tokens, keys -> stop tokens by their places among the tokens
    "the key eot_token_id": ({"<e>": CONTROL, "<t>": CONTROL}, {"eot_token_id": 1}, (0, 1)),
    "the key eom_token_id": ({"<e>": CONTROL, "<m>": CONTROL}, {"eom_token_id": 1}, (0, 1)),
    "by their text": (
        {"<e>": CONTROL, "<|im_end|>": CONTROL, "<x>": CONTROL, "<end_of_turn>": CONTROL},
        {},
        (0, 1, 3),
    ),
    "by their text, typed as ordinary": ({"<e>": CONTROL, "<|eot_id|>": NORMAL}, {}, (0, 1)),
    "of infilling": (
        {
            "<e>": CONTROL,
            "<|file_sep|>": CONTROL,
            "<|fim_pad|>": CONTROL,
            "<|fim_middle|>": CONTROL,
        },
        {},
        (0, 1, 2),
    ),
}


@pytest.mark.parametrize("case", ENDS)
def test_stop_tokens_are_those_of_llama_cpp(case: str, tmp_path: Path):
    special, keys, wanted = ENDS[case]
    first = len(TOKENS)
    keys = {name: first + number for name, number in keys.items()}
    model = load_model(written(tmp_path / "a.gguf", special=special, **keys))
    assert model.eos_token_ids == tuple(first + number for number in wanted)
    assert ids_of(tmp_path / "a.gguf", *special) == [[first + n] for n in range(len(special))]


def test_bos_and_eos_are_put_around_a_text_as_the_file_says(tmp_path: Path):
    first, special = len(TOKENS), {"<b>": CONTROL, "<e>": CONTROL}
    roles = {"special": special, "bos_token_id": first, "eos_token_id": first + 1}

    def ids(pre: str, **flags: bool) -> list[int]:
        return ids_of(written(tmp_path / f"{pre}{flags}.gguf", pre=pre, **roles, **flags), "IT")[0]

    text = ids("qwen2")
    assert text == ids("llama-bpe", add_bos_token=False)
    assert ids("qwen2", add_bos_token=True) == ids("llama-bpe") == [first, *text]
    assert ids("qwen2", add_bos_token=True, add_eos_token=True) == [first, *text, first + 1]
    fails(written(tmp_path / "none.gguf", add_bos_token=True), "add_bos_token")


def test_an_ordinary_token_that_pads_stays_ordinary(tmp_path: Path):
    model = load_model(written(tmp_path / "a.gguf", pad_token_id=0))
    assert model.tokenizer is not None
    assert model.hf.config.pad_token_id == 0
    assert model.tokenizer.decode([0, 1], skip_special_tokens=True) == TOKENS[0] + TOKENS[1]


def test_named_chat_templates_come_along(tmp_path: Path):
    named = [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}]
    tokenizer = load_model(written(tmp_path / "a.gguf", chat_template=named)).tokenizer
    assert tokenizer is not None
    assert tokenizer.chat_template == {"default": "A", "tool_use": "B"}
    single = load_model(written(tmp_path / "b.gguf", chat_template="A")).tokenizer
    assert single is not None
    assert single.chat_template == "A"


def test_an_id_beyond_the_tokens_is_none_as_in_llama_cpp(tmp_path: Path):
    model = load_model(written(tmp_path / "a.gguf", unk_token_id=99_999, eot_token_id=99_999))
    assert model.tokenizer is not None
    assert model.tokenizer.unk_token_id is None
    assert model.eos_token_ids == (len(TOKENS),)
