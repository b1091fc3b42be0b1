"""A model that its configuration makes larger than its files is refused before memory is taken."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from paceline.errors import ModelLoadError
from paceline.models import load_model
from paceline.models.inspection import read_header
from paceline.models.sizes import Size, stored_size, within
from tiny import tiny_hf


def changed(folder: Path, **settings: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


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
    changed(model_directory, **settings)
    with pytest.raises(ModelLoadError) as caught:
        read(model_directory)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_positions_of_a_model_have_a_limit(tmp_path: Path):
    tiny_hf("gpt2", n_positions=64).save_pretrained(tmp_path)
    changed(tmp_path, n_positions=60_000)
    with pytest.raises(ModelLoadError, match="at least 2 weights with"):
        load_model(tmp_path)


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
