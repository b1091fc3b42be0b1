"""What is wrong with the inputs is said before a model is loaded; --dry-run says what is right."""

import json
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from support.texts import Run, one_line, refused

Usage = namedtuple("Usage", "total used free")
SHORT = ("--set", "max_prompt_tokens=8", "--set", "max_new_tokens=8")


def arguments(command: str, folder: Path, tmp_path: Path, **places: Any) -> list[Any]:
    """A complete command line; a place that is given stands for the right one."""
    corpus = places.get("text", folder / "corpus.jsonl")
    if command == "tune" and "text" not in places:  # which confirms a setting on eight examples
        corpus = folder / "many.txt"
        corpus.write_text("".join(f"the cat number {number}\n" for number in range(40)))
    target, draft = places.get("target", folder / "target"), places.get("draft", folder / "draft")
    output = places.get("output", tmp_path / "out")
    pair = ["--target", target, "--draft", draft]
    run = ["--output", output]
    smoke = ["--set", "num_steps=1", "--set", "batch_size=2", "--set", f"data.train={corpus}"]
    few = ["--layers", "0,1", "--vocabulary", "20"]
    bench = ["--set", f"task={{task: text, corpus: {corpus}}}", *run, *SHORT]
    bench += ["--set", "num_examples=2"]
    return {
        **{name: [*pair, "--prompts", corpus, *SHORT] for name in ("measure", "analyze", "verify")},
        "align": [*pair, *run, *smoke],
        "pretrain": [*run, *smoke, "--set", f"model={target}"],
        "generate-data": [*pair[:2], "--prompts", corpus, *run, *SHORT],
        "bench": [*pair, *bench],
        "tune": [*pair, *bench, "--max-latency", "0.9", "--set", "num_confirmed=8"],
        "perplexity": ["--model", target, "--text", corpus],
        "draft": [*pair[:2], "--out", output, *few, "--text", corpus],
    }[command]


LONG_RUNNING = (
    *("measure", "analyze", "verify", "align", "pretrain", "generate-data", "bench", "tune"),
    *("draft", "perplexity"),
)


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize("command", LONG_RUNNING)
def test_a_dry_run_reads_no_weights_and_leaves_nothing(
    run: Run, pair_folder: Path, tmp_path: Path, command: str
):
    code, out, err = run(command, *arguments(command, pair_folder, tmp_path), "--dry-run")
    assert code == 0, err
    assert all(line.startswith("paceline: note: ") for line in err.splitlines())
    assert "llama of 4 layers" in out
    assert out.endswith("These checks passed. Nothing was run.\n")
    assert not (tmp_path / "out").exists()
    if command in ("measure", "perplexity"):
        _, printed, _ = run(
            command, *arguments(command, pair_folder, tmp_path), "--dry-run", "--json"
        )
        lines = out.splitlines()[:-1]
        assert json.loads(printed) == {"dry_run": True, "checks": lines}


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize("command", LONG_RUNNING)
def test_a_text_that_is_not_there_is_said_before_weights_are_read(
    run: Run, pair_folder: Path, tmp_path: Path, command: str
):
    missing = tmp_path / "nowhere.jsonl"
    assert str(missing) in refused(
        run, command, *arguments(command, pair_folder, tmp_path, text=missing)
    )


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize("command", LONG_RUNNING)
def test_weights_that_were_cut_off_are_found_by_their_header(
    run: Run, pair_folder: Path, tmp_path: Path, command: str
):
    target = tmp_path / "cut"
    shutil.copytree(pair_folder / "target", target)
    weights = target / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert str(target) in refused(
        run, command, *arguments(command, pair_folder, tmp_path, target=target)
    )


@pytest.mark.usefixtures("no_weights")
def test_a_prompt_that_does_not_fit_is_named_by_file_and_line(
    run: Run, pair_folder: Path, tmp_path: Path
):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("the cat\n\n" + "the cat " * 60 + "\nthe hen\n")
    given = ("--target", pair_folder / "target", "--draft", pair_folder / "draft")
    for command in ("measure", "analyze", "verify"):
        short = ("--set", "max_new_tokens=4")
        line = refused(run, command, *given, "--prompts", prompts, *short)
        assert f"{prompts} line 3 has " in line
        assert "holds 64; set max_prompt_tokens" in line


@pytest.mark.usefixtures("no_weights")
def test_a_disk_without_room_for_checkpoints_is_said_first(
    run: Run, pair_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("shutil.disk_usage", lambda _path: Usage(10, 9, 1))
    code, _, err = run("align", *arguments("align", pair_folder, tmp_path))
    assert code == 3
    assert "needs about" in one_line(err)
    assert not (tmp_path / "out").exists()
