"""From nothing to a frontier and a tuned setting, through the real command line, in seconds."""

import json
from pathlib import Path

import pytest

from paceline.config import load_config
from paceline.decode.strategies import DecodingConfig
from support.processes import run_command
from support.texts import refused

SMOKE = Path(__file__).parents[2] / "configs" / "smoke"
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
    assert "5 cells done, 0 failed, 0 left" in " ".join(done.stdout.split())
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


def test_a_rule_without_its_setting_is_one_line(run):
    wrong = ("--config", SMOKE / "bench.yaml", "--set", "grid.rules=[{rule: chow}]")
    said = "alpha is missing; give its alpha, or the key in a file"
    assert said in refused(run, "bench", *wrong)
