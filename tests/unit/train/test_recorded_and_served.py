"""Alignment on states that the target recorded, and on text that a server of it wrote."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.data.answering import Answer, ShardStore
from paceline.data.distillation_data import generate_data
from paceline.errors import ConfigError, ModelLoadError, PromptError, UnsupportedModelError
from paceline.models import load_model
from paceline.models.contract import Texts
from paceline.models.loading import load_head
from paceline.train import align
from support.data import WORDS, answers, generation, write_lines
from support.engines import Served, serving
from support.runs import align_config, losses, write_pair

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=["llama", "gemma2", "granite"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pair, `records` of its target, and `head`: the target's files without its layers."""
    folder = write_pair(tmp_path_factory.mktemp("pair"), architecture=request.param)
    write_lines(folder / "prompts.jsonl", *[{"prompt": f"the {word}"} for word in WORDS[:8]])
    writer = {"kind": "model", "hidden_states": True, "top_logprobs": 2}
    settings = {"writer": writer, "temperatures": [1], "num_per_prompt": 1, "dtype": "float32"}
    generate_data(generation(folder, folder / "records", **settings))
    shutil.copytree(folder / "target", folder / "head")
    weights = load_file(folder / "target" / "model.safetensors")
    kept = {name: weight for name, weight in weights.items() if ".layers." not in name}
    assert len(kept) < len(weights)
    save_file(kept, folder / "head" / "model.safetensors", {"format": "pt"})
    return folder


def recorded(folder: Path, output: Path, **changes: Any) -> Path:
    data = {"train": str(folder / "records" / "data"), "recorded_states": True}
    given: dict[str, Any] = {"target": str(folder / "head"), "data": data, "max_prompt_tokens": 8}
    given["max_completion_tokens"] = 12
    return align(align_config(folder, output, **given | changes))


def test_recorded_states_are_those_of_the_target(folder: Path):
    target = load_model(folder / "target", dtype="float32")
    for answer in answers(folder / "records"):
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
    whole: dict[str, Any] = {
        "data": {"train": str(folder / "records" / "data")},
        "max_prompt_tokens": 8,
    }
    whole["max_completion_tokens"] = 12
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
    whole = answers(folder / "records")
    first = whole[0].model_dump()
    faults = [
        (None, "has no hidden_states; record them"),
        (first["hidden_states"][: len(first["hidden_states"]) // 2], "name the target that"),
    ]
    for number, (states, says) in enumerate(faults):
        store = ShardStore(tmp_path / f"{number}")
        changed = [Answer(**first | {"hidden_states": states}), *whole[1:]]
        store.write("00000-of-00001.parquet", changed)
        data = {"train": str(store.directory), "recorded_states": True}
        with pytest.raises(PromptError, match=re.escape(says)):
            recorded(folder, tmp_path / f"run-{number}", data=data)


@ONE_KIND
def test_what_needs_the_whole_target_is_one_line(folder: Path, tmp_path: Path):
    data = {"train": str(folder / "records" / "data"), "recorded_states": True}
    for changes in ({"fixed_fraction": 0.5}, {"data": data | {"held_out_from_train": 2}}):
        with pytest.raises(ConfigError, match="need the whole target"):
            recorded(folder, tmp_path / "run", **changes)


@pytest.mark.parametrize("kind", ["vllm", "llama.cpp"])
def test_text_of_a_server_trains_as_with_the_target_itself(tmp_path: Path, kind: str):
    place = write_pair(tmp_path / "pair")
    write_lines(place / "prompts.jsonl", *[{"prompt": f"the {word}"} for word in WORDS[:8]])
    served = Served(place, kind=kind)
    with serving(served.routes) as url:
        writer = {"kind": "openai", "url": url, "top_logprobs": served.model.vocab_size}
        records = generate_data(generation(place, tmp_path / "records", writer=writer))
    settings: dict[str, Any] = {"data": {"train": str(records / "data")}, "max_prompt_tokens": 8}
    settings["max_completion_tokens"] = 12
    wanted = losses(align(align_config(place, tmp_path / "loaded", **settings)))
    tokenizer: Any = load_model(place / "target").tokenizer
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    alone = {"target": str(tmp_path / "tokenizer"), "objective": "top_k_tail"}
    config = align_config(place, tmp_path / "run", **settings | alone)
    assert not config.loads_target
    assert losses(align(config)) == pytest.approx(wanted, rel=1e-4, abs=1e-5)
