"""A model that its configuration makes larger than its files is refused before memory is taken."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    LlamaConfig,
    MT5Config,
    MT5ForConditionalGeneration,
)

from paceline.errors import ModelLoadError
from paceline.models import load_model
from paceline.models.checkpoint_files import Size, _refuse_counts, stored_size, within
from paceline.models.inspection import read_header
from support.checkpoints import edit, fails
from support.models import tiny_hf


@pytest.mark.parametrize("read", [load_model, read_header])
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"vocab_size": 2_000_000_000}, "at least 1 weights with 64,000,000,000 values"),
        ({"intermediate_size": 1 << 40}, "values, and the files have 39 with "),
        ({"num_hidden_layers": 9_000}, "weights with"),
        ({"num_hidden_layers": 3_000_000}, "has num_hidden_layers = 3000000, and at most 10,000"),
        ({"num_labels": 3_000_000_000}, "has num_labels = 3000000000, and at most 10,000"),
        ({"eos_token_id": [1 << 40]}, "has eos_token_id = 1099511627776, and at most 4,194,304"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_settings_beyond_the_files_are_one_line(
    model_directory: Path, read: Callable[[Path], Any], settings: dict[str, Any], said: str
):
    edit(model_directory / "config.json", **settings)
    fails(model_directory, said, load=read)


def test_positions_of_a_model_have_a_limit(tmp_path: Path):
    tiny_hf("gpt2", n_positions=64).save_pretrained(tmp_path)
    edit(tmp_path / "config.json", n_positions=60_000)
    fails(tmp_path, "at least 2 weights with")


def test_masks_have_a_limit():
    mask, meta = torch.nn.Module(), torch.device("meta")
    with (
        pytest.raises(ModelLoadError, match="1 buffers with"),
        within("m", lambda: Size(1, 1)),
        meta,
    ):
        mask.register_buffer("mask", torch.ones(1 << 15, 1 << 15))
    mask.register_buffer("more", torch.ones(1 << 15, 1 << 15, device=meta))


def test_a_tensor_of_one_value_repeated_is_stored_once(tmp_path: Path):
    torch.save({"w": torch.ones(1).expand(1 << 40)}, tmp_path / "pytorch_model.bin")
    assert stored_size(tmp_path, LlamaConfig()) == Size(1, 4)


def test_a_model_that_is_nowhere_has_a_limit_of_tensors_alone():
    config = LlamaConfig(num_hidden_layers=1, hidden_size=64, vocab_size=1 << 40)
    with within("m", lambda: stored_size("nobody/nothing", config)), torch.device("meta"):
        assert AutoModelForCausalLM.from_config(config).get_input_embeddings() is not None


def test_an_embedding_that_is_larger_than_the_rest_is_stored_once_and_built_several_times(
    tmp_path: Path,
):
    shape = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
    MT5ForConditionalGeneration(MT5Config(vocab_size=300_000, **shape)).save_pretrained(tmp_path)
    assert read_header(tmp_path).hf.config.vocab_size == 300_000


def test_pickled_weights_of_old_files_and_beside_other_values_are_read(tmp_path: Path):
    hf = tiny_hf()
    hf.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    stored = {**hf.state_dict(), "version": 1.0}
    for zipped in (True, False):
        torch.save(stored, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
        size = stored_size(tmp_path, hf.config)
        assert size is not None
        assert size.tensors == len(stored) - 1


@pytest.mark.parametrize("zipped", [True, False])
def test_no_error_advises_to_run_the_code_in_pickled_weights(zipped: bool, tmp_path: Path):
    hf = tiny_hf()
    hf.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    stored = {**hf.state_dict(), "code": Path()}
    torch.save(stored, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    with pytest.raises(ModelLoadError, match=r"\(pickled code is not run\); it may be"):
        load_model(tmp_path)


def test_names_of_one_storage_count_no_more_than_their_file_holds(tmp_path: Path):
    file = tmp_path / "pytorch_model.bin"
    value = torch.zeros(1 << 16)
    torch.save({f"name{number}": value for number in range(500)}, file)
    assert stored_size(tmp_path, LlamaConfig()) == Size(500, 2 * file.stat().st_size)


@pytest.mark.parametrize("kind", ["gemma3n_text", "gemma4_text", "llama", "bart", "falcon_h1"])
def test_counts_that_architectures_have_by_default_are_no_error(kind: str):
    settings = json.loads(CONFIG_MAPPING[kind]().to_json_string(use_diff=False))
    _refuse_counts(Path("config.json"), settings)
