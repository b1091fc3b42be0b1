"""Alignment on hidden states that the target recorded: its layers are not needed any more."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.config import validate
from paceline.data.answering import Answer, ShardStore
from paceline.data.distillation_data import generate_data
from paceline.data.requests import GenerateDataConfig
from paceline.errors import ConfigError, ModelLoadError, PromptError, UnsupportedModelError
from paceline.models import load_model
from paceline.models.contract import Texts
from paceline.models.loading import load_head
from paceline.train import align
from support.runs import align_config, losses, write_corpus, write_pair

pytestmark = pytest.mark.slow

_WORDS = ("cat", "hat", "pan", "tin", "inn", "hen", "rain", "river")


@pytest.fixture(scope="module", params=["llama", "gemma2", "granite"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pair, `records` of its target, and `head`: the target's files without its layers."""
    folder = write_pair(tmp_path_factory.mktemp("pair"), architecture=request.param)
    write_corpus(folder / "prompts.jsonl", [{"prompt": f"the {word}"} for word in _WORDS])
    settings = {
        "target": str(folder / "target"),
        "writer": {"kind": "model", "hidden_states": True, "top_logprobs": 2},
        "output": str(folder / "records"),
        "prompts": str(folder / "prompts.jsonl"),
        "temperatures": [1.0],
        "max_prompt_tokens": 8,
        "max_new_tokens": 12,
        "dtype": "float32",
    }
    generate_data(validate(GenerateDataConfig, settings))
    shutil.copytree(folder / "target", folder / "head")
    weights = load_file(folder / "target" / "model.safetensors")
    kept = {name: weight for name, weight in weights.items() if ".layers." not in name}
    assert len(kept) < len(weights)
    save_file(kept, folder / "head" / "model.safetensors", {"format": "pt"})
    return folder


def answers(folder: Path) -> list[Answer]:
    return ShardStore(folder / "records" / "data").read()


def recorded(folder: Path, output: Path, **changes: Any) -> Path:
    data = {"train": str(folder / "records" / "data"), "recorded_states": True}
    given = {"target": str(folder / "head"), "data": data, "max_prompt_tokens": 8}
    return align(align_config(folder, output, **given | changes))


def test_recorded_states_are_those_of_the_target(folder: Path):
    target = load_model(folder / "target", dtype="float32")
    for answer in answers(folder):
        text = torch.tensor([[*answer.prompt_tokens, *answer.completion_tokens]])
        with torch.no_grad():
            logits = target.plain_logits(Texts(text))[0, len(answer.prompt_tokens) - 1 : -1]
        assert answer.hidden_states is not None
        states = torch.frombuffer(bytearray(answer.hidden_states), dtype=torch.bfloat16)
        states_TD = states.view(len(answer.completion_tokens), -1).float()
        found = target.head.logits(states_TD)
        logits = logits[:, : found.shape[1]]
        coarse = 0.006 * float(logits.abs().max())
        torch.testing.assert_close(found, logits, rtol=0.02, atol=coarse)


@pytest.mark.parametrize(
    ("folder", "objective"),
    [("llama", "forward_kl"), ("gemma2", "tvd"), ("granite", "forward_kl")],
    indirect=["folder"],
)
def test_they_train_as_the_target_itself(folder: Path, tmp_path: Path, objective: str):
    found = losses(recorded(folder, tmp_path / "run", objective=objective))
    whole = {"data": {"train": str(folder / "records" / "data")}, "max_prompt_tokens": 8}
    wanted = losses(align(align_config(folder, tmp_path / "whole", objective=objective, **whole)))
    assert found == pytest.approx(wanted, rel=0.01)
    assert wanted[-1] < wanted[0]


def test_a_head_is_read_without_the_layers(folder: Path):
    with pytest.raises(ModelLoadError, match="weights are missing"):
        load_model(folder / "head")
    head = load_head(folder / "head", dtype="float32")
    whole = load_model(folder / "target", dtype="float32")
    assert torch.equal(head.head_weight, whole.head_weight)
    assert head.head.cap == whole.head.cap
    assert (head.vocab_size, head.max_length) == (whole.vocab_size, whole.max_length)
    assert head.tokenizer is not None


def test_an_encoder_decoder_has_no_head_of_its_own(tmp_path: Path):
    place = write_pair(tmp_path, architecture="t5_v1_1")
    with pytest.raises(UnsupportedModelError, match="head cannot be loaded alone"):
        load_head(place / "target")


ONE_KIND = pytest.mark.parametrize("folder", ["llama"], indirect=True)
"""What does not depend on the architecture."""


@ONE_KIND
def test_records_that_cannot_be_used_are_one_line(folder: Path, tmp_path: Path):
    rows = [answer.model_dump() for answer in answers(folder)]
    faults = [
        (None, "has no hidden_states; record them"),
        (rows[0]["hidden_states"][: len(rows[0]["hidden_states"]) // 2], "name the target that"),
    ]
    for number, (states, says) in enumerate(faults):
        store = ShardStore(tmp_path / f"{number}")
        changed = [Answer(**rows[0] | {"hidden_states": states}), *answers(folder)[1:]]
        store.write("00000-of-00001.parquet", changed)
        data = {"train": str(store.directory), "recorded_states": True}
        with pytest.raises(PromptError, match=re.escape(says)):
            recorded(folder, tmp_path / f"run-{number}", data=data)


@ONE_KIND
@pytest.mark.parametrize("changes", [{"fixed_fraction": 0.5}, {"shard": ["target"]}])
def test_what_needs_the_whole_target_is_one_line(
    folder: Path, tmp_path: Path, changes: dict[str, Any]
):
    with pytest.raises(ConfigError, match="need the whole target"):
        recorded(folder, tmp_path / "run", **changes)
