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
from transformers import PreTrainedModel

from paceline.errors import ModelLoadError, StorageError, UnsupportedModelError
from paceline.models import load_model, wrap_model
from paceline.models.compatibility import check_same_vocabulary
from paceline.models.gguf import converted_gguf
from paceline.models.loading import load_tokenizer
from tiny import tiny_hf, tiny_tokenizer

TEXT = [5, 9, 3, 7, 11, 20]
F32, F16, Q8_0 = 0, 1, 7  # general.file_type


def write_gguf(
    path: Path, hf: PreTrainedModel, *, file_type: int = F32, arch: str = "llama"
) -> Path:
    """A llama as llama.cpp keeps it: rotary pairs interleaved, tokenizer inside."""
    config, tokenizer = hf.config, tiny_tokenizer()
    writer = gguf.GGUFWriter(path, arch)
    writer.add_file_type(file_type)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in tokenizer.all_special_tokens else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in backend["model"]["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(1)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, weight in hf.state_dict().items():
        stem, suffix = name.rsplit(".", 1)
        array = weight.float().numpy()
        part = stem.rsplit(".", 1)[-1]
        if part in heads:
            out, into = array.shape
            array = array.reshape(heads[part], 2, out // heads[part] // 2, into)
            array = array.swapaxes(1, 2).reshape(out, into)
        if file_type == F16 and array.ndim == 2:
            array = array.astype(np.float16)
        kind = None
        if file_type == Q8_0 and array.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            array = gguf.quants.quantize(array, kind)
        writer.add_tensor(f"{names.get_name(stem)}.{suffix}", array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def hf() -> PreTrainedModel:
    return tiny_hf("llama", vocab_size=266, intermediate_size=64)


@pytest.fixture
def gguf_file(tmp_path: Path, hf: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
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


def test_digits_are_split_as_llama_cpp_splits_them_for_this_kind_of_file(gguf_file: Path):
    backend: Any = load_tokenizer(gguf_file)
    split = backend.backend_tokenizer.pre_tokenizer.pre_tokenize_str("in   51 ½")
    # words alone would give two spaces, then one with 51, and one with ½
    assert [piece for piece, _ in split] == ["in", "ĠĠĠ", "5", "1", "Ġ", "Â½"]


def test_a_model_from_gguf_may_speculate_with_one_from_a_directory(
    gguf_file: Path, hf: PreTrainedModel
):
    # transformers adds an <|endoftext|> that has no logit to every tokenizer it takes from GGUF
    assert check_same_vocabulary(load_model(gguf_file), wrap_model(hf, tiny_tokenizer())) == 266


@pytest.mark.parametrize(
    ("file_type", "stored"), [(F32, "float32"), (F16, "float16"), (Q8_0, "bfloat16")]
)
def test_plain_files_keep_their_precision_and_quantised_ones_become_bfloat16(
    tmp_path: Path,
    hf: PreTrainedModel,
    file_type: int,
    stored: str,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    entry = converted_gguf(write_gguf(tmp_path / "tiny.gguf", hf, file_type=file_type))
    config = json.loads((entry / "config.json").read_text())
    assert config["dtype"] == stored
    assert "quantization_config" not in config


def test_the_second_load_reads_no_gguf(gguf_file: Path, monkeypatch: pytest.MonkeyPatch):
    first = load_model(gguf_file, dtype="float32")
    monkeypatch.setattr("paceline.models.gguf._convert", None)
    monkeypatch.setattr("paceline.models.gguf._check", None)
    second = load_model(gguf_file, dtype="float32")
    assert torch.equal(first.head_weight, second.head_weight)


def test_a_changed_file_is_converted_anew(gguf_file: Path, hf: PreTrainedModel):
    before = converted_gguf(gguf_file)
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
    with pytest.raises(StorageError, match="the disk is full"):
        load_model(gguf_file)
    assert entries(tmp_path) == []
    monkeypatch.undo()
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    assert load_model(gguf_file).vocab_size == 266


def test_the_scratch_of_a_killed_conversion_is_swept_up(gguf_file: Path, tmp_path: Path):
    entry = converted_gguf(gguf_file)
    left = entry.parent / f".{entry.name}.killed"
    entry.rename(left)  # half a conversion, for all anybody knows
    assert converted_gguf(gguf_file) == entry
    assert entries(tmp_path) == [entry.name]


def test_two_at_once_make_one_entry(gguf_file: Path, tmp_path: Path):
    with ThreadPool(2) as pool:
        found = pool.map(converted_gguf, [gguf_file] * 2, chunksize=1)
    assert found[0] == found[1]
    assert entries(tmp_path) == [found[0].name]
    assert load_model(gguf_file).vocab_size == 266


@pytest.mark.parametrize("keep", [0, 3, 20, 2_000, 30_000])
def test_a_cut_file_is_refused(gguf_file: Path, tmp_path: Path, keep: int):
    gguf_file.write_bytes(gguf_file.read_bytes()[:keep])
    with pytest.raises(ModelLoadError, match="not a complete GGUF file") as caught:
        load_model(gguf_file)
    assert "download it again" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert entries(tmp_path) == []


def test_something_else_by_the_name_of_gguf_is_refused(tmp_path: Path):
    (tmp_path / "photo.gguf").write_bytes(b"\x89PNG" + bytes(5000))
    with pytest.raises(ModelLoadError, match="not a complete GGUF file"):
        load_model(tmp_path / "photo.gguf")


def test_an_architecture_transformers_cannot_convert_is_refused(
    tmp_path: Path, hf: PreTrainedModel
):
    path = write_gguf(tmp_path / "strange.gguf", hf, arch="martian")
    with pytest.raises(ModelLoadError, match="martian") as caught:
        load_model(path)
    assert "\n" not in str(caught.value)


def test_a_gguf_of_an_architecture_that_cannot_roll_back_is_refused_before_it_is_converted(
    gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def refuse(_config: object) -> None:
        raise UnsupportedModelError("mamba has a recurrent state")

    monkeypatch.setattr("paceline.models.gguf.refuse_by_name", refuse)
    with pytest.raises(UnsupportedModelError, match="mamba"):
        load_model(gguf_file)
    assert entries(tmp_path) == []


def test_without_the_gguf_package_one_line_says_what_to_install(
    gguf_file: Path, monkeypatch: pytest.MonkeyPatch
):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "gguf" else find(name, *rest),
    )
    with pytest.raises(ModelLoadError, match=r"pip install -e '\.\[gguf\]'"):
        load_model(gguf_file)
