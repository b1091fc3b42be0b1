"""What users get wrong: one line that names the place, and exit code 2 (3 where a place cannot be written)."""

import io
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from printed import one_line

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def broken_draft(pair_folder: Path, tmp_path: Path) -> Path:
    """A draft with one weight that is not a number."""
    draft = tmp_path / "broken"
    shutil.copytree(pair_folder / "draft", draft)
    weights = load_file(draft / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][0, 3] = float("nan")
    save_file(weights, draft / "model.safetensors", metadata={"format": "pt"})
    return draft


@pytest.mark.parametrize("command", ["measure", "decode", "align", "verify", "analyze"])
def test_a_draft_with_a_weight_that_is_not_a_number_is_named(
    run: Run, pair_folder: Path, broken_draft: Path, tmp_path: Path, command: str
):
    corpus = pair_folder / "corpus.jsonl"
    rest: dict[str, tuple[Any, ...]] = {
        "decode": ("--prompt", "the cat"),
        "align": (
            "--output",
            tmp_path / "run",
            "--set",
            f"data.train={corpus}",
            "--set",
            "num_steps=1",
        ),
    }
    arguments = rest.get(command, ("--prompts", corpus))
    pair = ("--target", pair_folder / "target", "--draft", broken_draft)
    code, _, err = run(command, *pair, *arguments)
    assert code == 2
    line = one_line(err)
    assert "holds NaN in model.layers.1.mlp.up_proj.weight" in line
    assert str(broken_draft) in line


def test_a_prompt_that_is_not_utf8_is_named_with_its_byte(
    run: Run, pair_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    decode = ("decode", "--target", pair_folder / "target")
    code, _, err = run(*decode, "--prompt", "caf\udce9")  # as Python reads such an argument
    assert (code, "0xe9 at offset 3" in one_line(err)) == (2, True)
    latin = tmp_path / "latin.txt"
    latin.write_bytes("déjà".encode("latin-1"))
    code, _, err = run(*decode, "--prompt-file", latin)
    assert code == 2
    assert f"{latin} is not UTF-8 (byte 0xe9 at offset 1)" in one_line(err)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff")))
    code, _, err = run(*decode)
    assert (code, "standard input is not UTF-8" in one_line(err)) == (2, True)


def test_a_prompt_file_may_begin_with_a_byte_order_mark(
    run: Run, pair_folder: Path, tmp_path: Path
):
    rest = ("--temperature", "0", "--max-new-tokens", "3", "--json")
    plain, marked = tmp_path / "a.txt", tmp_path / "b.txt"
    plain.write_bytes(b"the cat")
    marked.write_bytes(b"\xef\xbb\xbfthe cat")
    texts = [
        json.loads(
            run("decode", "--target", pair_folder / "target", "--prompt-file", path, *rest)[1]
        )
        for path in (plain, marked)
    ]
    assert texts[0]["tokens"] == texts[1]["tokens"]


@pytest.mark.parametrize("command", ["task", "corpus", "draft", "align", "generate-data"])
@pytest.mark.parametrize("place", ["/proc/paceline/out", "/sys/paceline/out", "{file}/out"])
def test_an_output_where_nothing_can_be_written_is_one_line(
    run: Run, pair_folder: Path, tmp_path: Path, command: str, place: str
):
    file = tmp_path / "file"
    file.write_text("kept")
    out = place.format(file=file)
    models = ("--target", pair_folder / "target", "--draft", pair_folder / "draft")
    corpus = pair_folder / "corpus.jsonl"
    arguments: dict[str, tuple[Any, ...]] = {
        "task": (
            "text",
            "--split",
            "test",
            "--count",
            "1",
            "--set",
            f"corpus={corpus}",
            "--out",
            out,
        ),
        "corpus": ("--out", out),
        "draft": (*models[:2], "--layers", "0", "--out", out),
        "align": (
            *models,
            "--output",
            out,
            "--set",
            f"data.train={corpus}",
            "--set",
            "num_steps=1",
        ),
        "generate-data": (*models[:2], "--prompts", corpus, "--output", out),
    }
    code, _, err = run(command, *arguments[command])
    assert code == 3
    assert out in one_line(err)
    assert file.read_text() == "kept"


def test_a_file_is_never_put_in_the_place_of_a_device(run: Run, pair_folder: Path, tmp_path: Path):
    """As the superuser one could; a pipe stands for it here."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    chosen = ("--split", "test", "--count", "1", "--set", f"corpus={pair_folder / 'corpus.jsonl'}")
    code, _, err = run("task", "text", *chosen, "--out", pipe)
    assert code == 3
    assert "no ordinary file" in one_line(err)
    assert pipe.is_fifo()
