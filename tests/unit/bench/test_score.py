"""`score`: answers of a server have the scores that bench gives them; none is asked for twice."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.bench import bench
from paceline.bench.score import ScoreConfig, score
from paceline.config import validate
from paceline.engines import text_servers
from paceline.environment import begin
from paceline.errors import ConfigError, EngineError, UsageError
from paceline.records import read_jsonl
from support.engines import Served, serving
from support.runs import bench_config

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_servers, "_PAUSE_S", 0.02)


def task(folder: Path, metric: str = "rouge1") -> dict[str, Any]:
    return {"task": "pairs", "corpus": str(folder / "questions.jsonl"), "metric": metric}


def config(folder: Path, output: Path, url: str, **changes: Any) -> ScoreConfig:
    values: dict[str, Any] = {
        "task": task(folder),
        "tokenizer": str(folder / "target"),
        "writer": {"kind": "openai", "url": url, "concurrency": 2, "patience_s": 0.1},
        "sampling": {"temperature": 0},
        "output": output,
        "num_examples": 7,
        "skip_examples": 1,
        "max_new_tokens": 9,
    }
    return validate(ScoreConfig, values | changes)


@pytest.fixture
def served(folder: Path) -> Iterator[tuple[Served, str]]:
    found = Served(folder)
    with serving(found.routes) as url:
        yield found, url


def test_scores_are_those_of_a_bench_of_the_target(folder: Path, tmp_path: Path, served: Any):
    found = score(config(folder, tmp_path / "score", served[1]))
    same = {"num_examples": 7, "skip_examples": 1}
    (row,) = bench(bench_config(folder, tmp_path / "bench", {"temperatures": [0.0]}, **same)).rows
    assert row.setting["strategy"] == "autoregressive"
    rows = sorted(read_jsonl(tmp_path / "score" / "metrics.jsonl"), key=lambda row: row["number"])
    assert row.units == tuple(range(1, 8))
    assert tuple(answer["score"] for answer in rows) == row.sums["score"]
    assert tuple(answer["num_tokens"] for answer in rows) == row.sums["tokens"]
    scores = [score or 0.0 for score in row.sums["score"]]
    assert found.score is not None
    assert found.score.value == pytest.approx(sum(scores) / 7)
    assert found.servers == ["vllm 0.32.0"]
    assert found.num_cut == sum(row["stop_reason"] == "length" for row in rows)


def test_answers_that_are_there_are_not_asked_for_again(folder: Path, tmp_path: Path, served: Any):
    server, url = served
    whole = score(config(folder, tmp_path / "whole", url))
    asked = len(server.bodies)
    server.faults = [(401, {"error": {"message": "no"}})]
    with pytest.raises(UsageError, match="answered 401"):
        score(config(folder, tmp_path / "run", url, writer={"url": url, "concurrency": 1}))
    server.faults = []
    path = tmp_path / "run" / "metrics.jsonl"
    lines = (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:3]) + lines[3][:20])  # killed while it wrote
    server.bodies.clear()
    manifest = tmp_path / "run" / "manifest.json"
    before = json.loads(manifest.read_text())["environment"]["began"]
    with begin({"environment": {"began": "2050-01-01 00:00:00"}}):
        found = score(config(folder, tmp_path / "run", url))
    assert json.loads(manifest.read_text())["environment"]["began"] == before
    assert len(server.bodies) == asked - 3
    assert found.score == whole.score
    server.bodies.clear()
    assert score(config(folder, tmp_path / "run", url)).score == whole.score
    assert not server.bodies


def test_mistakes_are_one_line(folder: Path, tmp_path: Path, served: Any):
    _, url = served
    done = config(folder, tmp_path / "run", url)
    score(done)
    with pytest.raises(ConfigError, match="max_new_tokens"):
        score(config(folder, tmp_path / "run", url, max_new_tokens=8))
    with pytest.raises(ConfigError, match="another task"):
        score(config(folder, tmp_path / "run", url, task=task(folder, "exact_match")))
    with pytest.raises(ConfigError, match=re.escape("leave sampling.repetition_penalty 1")):
        config(folder, tmp_path, url, sampling={"repetition_penalty": 1.2})
    with pytest.raises(UsageError, match="max_prompt_tokens 2"):
        score(config(folder, tmp_path / "short", url, max_prompt_tokens=2))
    with pytest.raises(EngineError, match="no server answered"):
        score(config(folder, tmp_path / "none", "http://127.0.0.1:9"))
