"""Alignment on text that servers of the target write while it trains."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.data.replay import ServedRounds
from paceline.engines import text_servers
from paceline.errors import ConfigError, EngineError
from paceline.models import load_model
from paceline.train import align
from support.engines import Served, serving
from support.runs import align_config, losses, write_corpus, write_pair

pytestmark = pytest.mark.slow

_WORDS = ("cat", "hat", "pan", "tin", "inn", "hen", "rain", "river")


@pytest.fixture(scope="module", params=["vllm", "llama.cpp"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_pair(tmp_path_factory.mktemp("pair"))
    write_corpus(folder / "prompts.jsonl", [{"prompt": f"the {word}"} for word in _WORDS])
    (folder / "kind").write_text(request.param)
    (folder / "tokenizer").mkdir()
    tokenizer: Any = load_model(folder / "target").tokenizer
    tokenizer.save_pretrained(folder / "tokenizer")
    return folder


ONE_KIND = pytest.mark.parametrize("folder", ["vllm"], indirect=True)
"""What does not depend on the kind of server."""


@pytest.fixture
def served(folder: Path) -> Iterator[tuple[Served, str]]:
    found = Served(folder, kind=(folder / "kind").read_text())
    with serving(found.routes) as url:
        yield found, url


def settings(folder: Path, url: str, top: int, **changes: Any) -> dict[str, Any]:
    return {
        "data": {"train": str(folder / "prompts.jsonl")},
        "writer": {"kind": "openai", "url": url, "top_logprobs": top, "concurrency": 3},
        "fixed_fraction": 0,
        "draft_fraction": 0,
        "target_rounds": {"rows": 8, "uses": 2},
        "num_steps": 8,
        "max_prompt_tokens": 8,
        **changes,
    }


def test_all_recorded_tokens_train_as_the_target_itself(folder: Path, tmp_path: Path, served: Any):
    server, url = served
    size = server.model.vocab_size
    loaded = align_config(folder, tmp_path / "loaded", **settings(folder, url, 0))
    wanted = losses(align(loaded))
    assert len(server.bodies) == 2 * 8, "two rounds of eight texts, each used twice"
    alone = {"target": str(folder / "tokenizer"), "objective": "top_k_tail"}
    config = align_config(folder, tmp_path / "run", **settings(folder, url, size, **alone))
    assert not config.loads_target
    assert losses(align(config)) == pytest.approx(wanted, rel=1e-4, abs=1e-5)


@ONE_KIND
def test_a_stopped_run_continues_with_the_same_texts(
    folder: Path, tmp_path: Path, served: Any, monkeypatch: pytest.MonkeyPatch
):
    _, url = served
    alone = {"target": str(folder / "tokenizer"), "objective": "top_k_tail"}
    given = settings(folder, url, 4, **alone, checkpoints={"every_steps": 2})
    whole = losses(align(align_config(folder, tmp_path / "whole", **given)))
    generate = ServedRounds._generate

    def fail(self: ServedRounds, number: int) -> Any:
        if number == 1:
            raise EngineError("the server is gone")
        return generate(self, number)

    monkeypatch.setattr(ServedRounds, "_generate", fail)
    config = align_config(folder, tmp_path / "run", **given)
    with pytest.raises(EngineError, match="the server is gone"):
        align(config)
    monkeypatch.undo()
    assert losses(align(config, resume=True)) == pytest.approx(whole, rel=1e-5)


@ONE_KIND
def test_no_server_is_one_line(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(text_servers, "_PAUSE_S", 0.02)
    given = settings(folder, "http://127.0.0.1:9", 0)
    given["writer"] |= {"patience_s": 0.1}
    with pytest.raises(EngineError, match="no server answered"):
        align(align_config(folder, tmp_path / "run", **given))


@ONE_KIND
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"objective": "top_k_tail"}, "let servers write the rest"),
        ({"target_rounds": {"train_prompts": True}}, "needs the target itself"),
        ({"sampling": {"repetition_penalty": 1.2}}, "leave sampling.repetition_penalty 1"),
    ],
)
def test_what_servers_cannot_do_is_one_line(
    folder: Path, tmp_path: Path, changes: dict[str, Any], says: str
):
    with pytest.raises(ConfigError, match=re.escape(says)):
        align_config(folder, tmp_path, **settings(folder, "http://127.0.0.1:9", 0, **changes))
