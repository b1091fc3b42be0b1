"""Every smoke configuration of alignment, through the real command line, on a tiny random model."""

import json
from pathlib import Path

import pytest

from paceline.records import read_jsonl
from support.processes import run_command
from support.runs import losses, write_corpus, write_pair

SMOKE = Path(__file__).parents[2] / "configs" / "smoke"
QUICK = Path(__file__).parents[2] / "configs" / "align" / "quick.yaml"


@pytest.mark.parametrize(
    ("name", "architecture"),
    [
        *((path.name, "llama") for path in sorted(SMOKE.glob("align*.yaml"))),
        ("align.yaml", "gemma2"),
        ("align.yaml", "granite"),
    ],
)
def test_a_smoke_configuration_raises_the_acceptance_and_ends_in_a_draft(
    name: str, architecture: str, tmp_path: Path
):
    write_pair(tmp_path / "tiny", architecture=architecture)
    options = ["--config", SMOKE / name, "--output", "run", "--set", "device=cpu"]
    done = run_command(tmp_path, "align", *options)
    assert done.returncode == 0, done.stderr
    assert "run/draft" in done.stdout
    assert "expected acceptance" in done.stdout
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
    write_corpus(folder / "corpus.jsonl", rows)
    changes = {"max_seconds": "null", "num_steps": 3, "max_completion_tokens": 20, "device": "cpu"}
    changes |= {"evaluation.max_prompt_tokens": 4, "data.train": folder / "corpus.jsonl"}
    paths = {"--target": folder / "target", "--draft": folder / "draft", "--output": "run"}
    options = [word for pair in paths.items() for word in pair]
    for key, value in changes.items():
        options += ["--set", f"{key}={value}"]
    done = run_command(tmp_path, "align", "--config", QUICK, *options)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()  # the table, and then the definition
    line = next(line for line in lines if line.startswith("expected acceptance"))
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    for when in ("before", "after"):
        assert f"{result[when]['expected_acceptance']:.3f} (" in line
    assert len(read_jsonl(tmp_path / "run" / "held_out.jsonl")) == 16
