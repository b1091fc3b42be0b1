"""The smoke configurations through the real command line, in seconds: training, bench, tune."""

import json
import re
from pathlib import Path

import pytest

from paceline.config import load_config
from paceline.decode.strategies import DecodingConfig
from paceline.records import read_jsonl
from support.data import write_lines
from support.processes import run_command
from support.runs import losses, write_pair

SMOKE = Path(__file__).parents[2] / "configs" / "smoke"
QUICK = Path(__file__).parents[2] / "configs" / "align" / "quick.yaml"
SUMS = ("--set", "min_terms=3", "--set", "max_terms=3", "--set", "max_digits=1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pair, made by the smoke configurations of pretraining."""
    place = tmp_path_factory.mktemp("bench-smoke")
    for split, count in (("train", "300"), ("test", "40")):
        arguments = ("--split", split, "--count", count, "--out", f"{split}.jsonl")
        assert run_command(place, "task", "arithmetic", *SUMS, *arguments).returncode == 0
    for name in ("target", "draft"):
        done = run_command(place, "pretrain", "--config", SMOKE / f"pretrain_{name}.yaml", *CPU)
        assert done.returncode == 0, done.stderr
    return place


CPU = ("--set", "device=cpu")


def test_pretraining_lowers_the_held_out_loss_and_the_draft_has_the_targets_tokenizer(
    folder: Path,
):
    for name in ("target", "draft"):
        result = json.loads((folder / "runs" / name / "result.json").read_text())
        assert result["after"]["loss"] < 0.7 * result["before"]["loss"]
    tokenizers = [folder / "runs" / n / "model" / "tokenizer.json" for n in ("target", "draft")]
    assert tokenizers[0].read_bytes() == tokenizers[1].read_bytes()


def test_a_bench_ends_without_a_failed_cell_and_its_report_has_every_part(folder: Path):
    done = run_command(folder, "bench", "--config", SMOKE / "bench.yaml", *CPU)
    assert done.returncode == 0, done.stderr
    wanted = "5 settings done, the target alone included, 0 failed, 0 to do"
    assert wanted in " ".join(done.stdout.split())
    drawn = run_command(folder, "report", "runs/bench")
    assert drawn.returncode == 0, drawn.stderr
    text = (folder / "runs/bench/report.html").read_text()
    for part in ("Quality against cost", "Best setting of each family", "token_v3"):
        assert part in text


def test_a_tuned_setting_is_one_that_decode_reads(folder: Path):
    done = run_command(folder, "tune", "--config", SMOKE / "tune.yaml", *CPU, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    path = folder / "runs/tune/decoding.yaml"
    written = load_config(DecodingConfig, path)
    assert found["chosen"]["decoding"] == written.model_dump(mode="json")
    pair = ("--target", "runs/target/model", "--draft", "runs/draft/model")
    text = run_command(folder, "decode", *pair, "--config", path, "--prompt", "7 - 2 + 5 =")
    assert text.returncode == 0, text.stderr


@pytest.mark.parametrize("name", sorted(path.name for path in SMOKE.glob("align*.yaml")))
def test_a_smoke_configuration_raises_the_acceptance_and_ends_in_a_draft(name: str, tmp_path: Path):
    write_pair(tmp_path / "tiny")
    options = ["--config", SMOKE / name, "--output", "run", "--set", "device=cpu"]
    done = run_command(tmp_path, "align", *options)
    assert done.returncode == 0, done.stderr
    assert "run/draft" in done.stdout
    assert re.search(r"^acceptance [\d.]+ \(.*\) -> [\d.]+ \(", done.stdout, re.MULTILINE)
    assert len(losses(tmp_path / "run")) == 12
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["after"]["expected_acceptance"] > result["before"]["expected_acceptance"]
    assert (tmp_path / "run" / "draft" / "model.safetensors").exists()


def test_the_quick_configuration_compares_before_and_after(tmp_path: Path):
    """On its own training text, a little of which is held out; in steps instead of seconds here."""
    folder = write_pair(tmp_path / "tiny")
    rows = [
        {"text": f"the {word} sat on the mat {number}"} for number in range(9) for word in "abc"
    ]
    write_lines(folder / "corpus.jsonl", *rows)
    changes = {"max_seconds": "null", "num_steps": 3, "max_completion_tokens": 20, "device": "cpu"}
    changes |= {
        "evaluation": "{max_prompt_tokens: 4, max_new_tokens: 32}",
        "data.train": folder / "corpus.jsonl",
    }
    changes |= {"max_prompt_tokens": 8, "loss_vocabulary": "null", "target_rounds.rows": 4}
    paths = {"--target": folder / "target", "--draft": folder / "draft", "--output": "run"}
    options = [word for pair in paths.items() for word in pair]
    for key, value in changes.items():
        options += ["--set", f"{key}={value}"]
    done = run_command(tmp_path, "align", "--config", QUICK, *options)
    assert done.returncode == 0, done.stderr
    line = next(line for line in done.stdout.splitlines() if line.startswith("acceptance"))
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    for when in ("before", "after"):
        assert f"{result[when]['expected_acceptance']:.3f} (" in line
    assert len(read_jsonl(tmp_path / "run" / "held_out.jsonl")) == 16
