"""A plan of generate-data: what a part of the run predicts, beside what the whole run makes."""

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.config import validate
from paceline.data import distillation_data
from paceline.data.answering import ShardStore
from paceline.data.distillation_data import generate_data, plan_run
from paceline.data.requests import GenerateDataConfig
from paceline.errors import UsageError
from support.engines import Served, serving
from support.runs import write_corpus
from support.texts import refused

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(folder: Path) -> Path:
    write_corpus(folder / "prompts.jsonl", [{"prompt": f"number {n}"} for n in range(40)])
    return folder


def config(folder: Path, output: Path, **changes: Any) -> GenerateDataConfig:
    values: dict[str, Any] = {
        "target": str(folder / "target"),
        "output": str(output),
        "prompts": str(folder / "prompts.jsonl"),
        "temperatures": [0.5, 1],
        "max_prompt_tokens": 8,
        "max_new_tokens": 30,
        "batch_size": 8,
        "dtype": "float32",
    }
    return validate(GenerateDataConfig, values | changes)


def test_a_part_predicts_the_run_and_keeps_nothing(folder: Path, tmp_path: Path):
    wanted = config(folder, tmp_path / "run")
    found = plan_run(wanted, 1e-9, price_per_hour=2.0)  # one part
    assert found.num_measured == 8
    assert not (tmp_path / "run").exists()
    run = generate_data(wanted)
    answers = ShardStore(run / "data").read()
    assert found.num_records == len(answers) == 40
    assert found.prompt_tokens == sum(len(answer.prompt_tokens) for answer in answers)
    whole = sum(len(answer.completion_tokens) for answer in answers)
    assert found.new_tokens.value == pytest.approx(whole, rel=0.15)
    rate = found.tokens_per_answer.value * found.num_measured / found.measured_s
    assert found.tokens_per_s == pytest.approx(rate)
    assert found.hours.value == pytest.approx(found.new_tokens.value / rate / 3600)
    assert found.cost == found.hours.scaled(2.0)
    assert found.bytes.high == pytest.approx(found.new_tokens.high * found.bytes_per_token)


def test_every_temperature_has_its_share_and_a_whole_run_is_exact(folder: Path, tmp_path: Path):
    short = {"num_per_prompt": 3, "max_new_tokens": 8}
    wanted = config(folder, tmp_path / "run", temperatures=[0.5, 0.5, 1], **short)
    shards = distillation_data.plan_shards(wanted, distillation_data.load_tokenizer(wanted.target))
    parts = list(distillation_data._parts(wanted, shards))
    planned = [request for shard in shards for request in shard.requests]
    assert sorted(r.id for part in parts for r in part.requests) == sorted(r.id for r in planned)
    begun = [part.requests[0].temperature for part in parts]
    assert abs(begun[:12].count(0.5) - 8) <= 1, "two thirds of the answers"
    assert all(len({r.temperature for r in part.requests}) == 1 for part in parts)
    found = plan_run(wanted, 1e9)
    answers = ShardStore(generate_data(wanted) / "data").read()
    whole = sum(len(answer.completion_tokens) for answer in answers)
    assert found.num_measured == found.num_records == len(answers)
    assert found.new_tokens.value == pytest.approx(whole)


def test_a_server_is_measured_through_the_command(run, folder: Path, tmp_path: Path):
    served = Served(folder)
    with serving(served.routes) as url:
        writer = {"kind": "openai", "url": url, "concurrency": 2, "top_logprobs": 3}
        file = tmp_path / "config.yaml"
        values = config(folder, tmp_path / "run", writer=writer).model_dump(mode="json")
        file.write_text(json.dumps(values))
        command = ("generate-data", "--config", file, "--plan", "0.001")
        code, out, err = run(*command, "--price", "3", "--json")
        assert code == 0, err
        found = json.loads(out)
        assert found["num_measured"] == 8
        texts = [body for body in served.bodies if body["max_tokens"] > 1]
        assert len(texts) == 9, "the first one is not measured"
        assert found["cost"]["value"] == pytest.approx(3 * found["hours"]["value"])
        code, out, _ = run(*command)
        assert code == 0
        assert "tokens, generated" in out
        assert "cost" not in out
    assert not (tmp_path / "run").exists()


def test_what_cannot_be_planned_is_one_line(run, folder: Path, tmp_path: Path):
    one = config(folder, tmp_path, prompts={"path": str(folder / "prompts.jsonl"), "limit": 1})
    with pytest.raises(UsageError, match="at least 2 answers, and the run has 1"):
        plan_run(one, 1)
    for options, says in ((("--plan", "0"), "is no duration"), (("--price", "1"), "--plan 60")):
        assert says in refused(run, "generate-data", *options)
