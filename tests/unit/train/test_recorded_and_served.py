"""Alignment on states that the target recorded, or on text that servers of it write meanwhile."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.data.answering import Answer, ShardStore
from paceline.data.distillation_data import generate_data
from paceline.data.replay import ServedRounds
from paceline.engines import text_servers
from paceline.errors import (
    ConfigError,
    EngineError,
    ModelLoadError,
    PromptError,
    UnsupportedModelError,
)
from paceline.models import load_model
from paceline.models.contract import Texts
from paceline.models.loading import load_head
from paceline.train import align
from support.data import WORDS, answers, generation
from support.engines import Served, serving
from support.runs import align_config, losses, write_corpus, write_pair

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=["llama", "gemma2", "granite"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pair, `records` of its target, and `head`: the target's files without its layers."""
    folder = write_pair(tmp_path_factory.mktemp("pair"), architecture=request.param)
    write_corpus(folder / "prompts.jsonl", [{"prompt": f"the {word}"} for word in WORDS[:8]])
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
    given = {"target": str(folder / "head"), "data": data, "max_prompt_tokens": 8}
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


@pytest.fixture(scope="module", params=["vllm", "llama.cpp"])
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = write_pair(tmp_path_factory.mktemp("pair"))
    write_corpus(place / "prompts.jsonl", [{"prompt": f"the {word}"} for word in WORDS[:8]])
    (place / "kind").write_text(request.param)
    (place / "tokenizer").mkdir()
    tokenizer: Any = load_model(place / "target").tokenizer
    tokenizer.save_pretrained(place / "tokenizer")
    return place


ONE_SERVER = pytest.mark.parametrize("place", ["vllm"], indirect=True)
"""What does not depend on the kind of server."""


@pytest.fixture
def served(place: Path) -> Iterator[tuple[Served, str]]:
    found = Served(place, kind=(place / "kind").read_text())
    with serving(found.routes) as url:
        yield found, url


def settings(place: Path, url: str, top: int, **changes: Any) -> dict[str, Any]:
    return {
        "data": {"train": str(place / "prompts.jsonl")},
        "writer": {"kind": "openai", "url": url, "top_logprobs": top, "concurrency": 3},
        "fixed_fraction": 0,
        "draft_fraction": 0,
        "target_rounds": {"rows": 8, "uses": 2},
        "num_steps": 8,
        "max_prompt_tokens": 8,
        **changes,
    }


def test_all_recorded_tokens_train_as_the_target_itself(place: Path, tmp_path: Path, served: Any):
    server, url = served
    size = server.model.vocab_size
    loaded = align_config(place, tmp_path / "loaded", **settings(place, url, 0))
    wanted = losses(align(loaded))
    assert len(server.bodies) == 2 * 8, "two rounds of eight texts, each used twice"
    alone = {"target": str(place / "tokenizer"), "objective": "top_k_tail"}
    config = align_config(place, tmp_path / "run", **settings(place, url, size, **alone))
    assert not config.loads_target
    assert losses(align(config)) == pytest.approx(wanted, rel=1e-4, abs=1e-5)


@ONE_SERVER
def test_a_stopped_run_continues_with_the_same_texts(
    place: Path, tmp_path: Path, served: Any, monkeypatch: pytest.MonkeyPatch
):
    _, url = served
    alone = {"target": str(place / "tokenizer"), "objective": "top_k_tail"}
    given = settings(place, url, 4, **alone, checkpoints={"every_steps": 2})
    whole = losses(align(align_config(place, tmp_path / "whole", **given)))
    generate = ServedRounds._generate

    def fail(self: ServedRounds, number: int) -> Any:
        if number == 1:
            raise EngineError("the server is gone")
        return generate(self, number)

    monkeypatch.setattr(ServedRounds, "_generate", fail)
    config = align_config(place, tmp_path / "run", **given)
    with pytest.raises(EngineError, match="the server is gone"):
        align(config)
    monkeypatch.undo()
    assert losses(align(config, resume=True)) == pytest.approx(whole, rel=1e-5)


@ONE_SERVER
def test_no_server_is_one_line(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(text_servers, "_PAUSE_S", 0.02)
    given = settings(place, "http://127.0.0.1:9", 0)
    given["writer"] |= {"patience_s": 0.1}
    with pytest.raises(EngineError, match="no server answered"):
        align(align_config(place, tmp_path / "run", **given))


@ONE_SERVER
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"objective": "top_k_tail"}, "let servers write the rest"),
        ({"target_rounds": {"train_prompts": True}}, "needs the target itself"),
        ({"sampling": {"repetition_penalty": 1.2}}, "leave sampling.repetition_penalty 1"),
    ],
)
def test_what_servers_cannot_do_is_one_line(
    place: Path, tmp_path: Path, changes: dict[str, Any], says: str
):
    with pytest.raises(ConfigError, match=re.escape(says)):
        align_config(place, tmp_path, **settings(place, "http://127.0.0.1:9", 0, **changes))
