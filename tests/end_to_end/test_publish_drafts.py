"""`make publish-drafts`: the archives of two drafts, as someone who downloads them sees them."""

import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM, AutoTokenizer

from paceline.config import validate
from paceline.measure import MeasureConfig, measure
from paceline.train import align
from support.engines import Answer, serving
from support.processes import run_command, write_program
from support.runs import align_config

ROOT = Path(__file__).parents[2]
Make = Callable[[], subprocess.CompletedProcess[str]]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("make") is None, reason="there is no make"),
]


@pytest.fixture(scope="module")
def made(pair_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `make demo` and the guide leave, of tiny models: the same draft twice."""
    runs = tmp_path_factory.mktemp("made")
    draft = align(align_config(pair_folder, runs / "demo/align")) / "draft"
    small = {"num_prompts": 3, "max_prompt_tokens": 4, "max_new_tokens": 8, "pass_repeats": 1}
    timed = {"sampling": {"temperature": 0}, "timed_prompts": 2, "gammas": [2]}
    models = {"target": str(pair_folder / "target"), "draft": str(draft)}
    texts = {"prompts": str(pair_folder / "corpus.jsonl")}
    found = measure(validate(MeasureConfig, {**models, **texts, **small, **timed}))
    (runs / "demo/measure-after-t0.json").write_text(found.model_dump_json())
    shutil.copytree(runs / "demo/align", runs / "direct/align")
    (runs / "direct/measure-t0.json").write_text(found.model_dump_json())
    return runs


@pytest.fixture
def runs(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "runs")


# the program `paceline` of a process that has imported everything
_CLIENT = """
import json, os, sys, urllib.request
asked = json.dumps([os.getcwd(), sys.argv[1:]]).encode()
answer = json.load(urllib.request.urlopen(URL, asked))
sys.stderr.write(answer["said"])
sys.exit(answer["code"])
"""


@pytest.fixture
def make(runs: Path, pair_folder: Path, tmp_path: Path) -> Iterator[Make]:
    """Runs the target on these directories; what it starts as `paceline` runs here."""

    def answer(asked: Any) -> Answer:
        done = run_command(asked[0], *asked[1])
        return 200, {"code": done.returncode, "said": done.stderr}

    write_program(tmp_path / "bin")
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv/.demo").touch()
    changes = {
        "VENV": tmp_path / "venv",
        "BIN": tmp_path / "bin",
        "DEMO_RUN": runs / "demo",
        "DEMO_MODEL": pair_folder / "target",
        "DIRECT_RUN": runs / "direct",
        "RELEASE": runs / "release",
    }
    given = [f"{name}={value}" for name, value in changes.items()]
    command = ["make", "-C", ROOT, "-o", tmp_path / "venv/.demo", "publish-drafts", *given]
    kept = {name: value for name, value in os.environ.items() if "MAKE" not in name}
    with serving({"/": answer}) as url:
        program = _CLIENT.replace("URL", repr(f"{url}/"))
        (tmp_path / "bin/paceline").write_text(f"#!{sys.executable} -S\n{program}")
        yield lambda: subprocess.run(
            list(map(str, command)), capture_output=True, text=True, check=False, env=kept
        )


def content_of(archive: Path) -> dict[str, bytes]:
    """Its files, but for the name of the draft; the archive itself tells no time and no owner."""
    with tarfile.open(archive) as opened:
        members = opened.getmembers()
        assert {(one.mtime, one.uid, one.gid) for one in members} == {(1577836800, 0, 0)}
        modes = {one.isdir(): oct(one.mode) for one in members}
        assert modes == {True: "0o755", False: "0o644"}
        assert [one.name for one in members] == sorted(one.name for one in members)
        files = {one.name: opened.extractfile(one) for one in members}
        return {
            name.partition("/")[2]: file.read().replace(b"direct", b"demo")
            for name, file in files.items()
            if file is not None
        }


def test_an_archive_has_the_right_sum_and_a_draft_that_transformers_loads(
    runs: Path, make: Make, tmp_path: Path
):
    release = runs / "release"
    release.mkdir()
    (release / "of an earlier run").touch()
    done = make()
    assert done.returncode == 0, done.stderr
    names = ["smollm2-135m-demo", "smollm2-135m-direct"]
    archives = [f"{name}.tar.gz" for name in names]
    assert sorted(path.name for path in release.iterdir()) == ["SHA256SUMS", *archives]
    checked = subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=release, check=False)
    assert checked.returncode == 0
    subprocess.run(["tar", "-xzf", release / archives[0], "-C", tmp_path], check=True)
    folder = tmp_path / names[0]
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    original = AutoModelForCausalLM.from_pretrained(runs / "demo/align/draft", dtype=torch.float32)
    assert all(torch.equal(loaded[name], one) for name, one in original.state_dict().items())
    assert AutoTokenizer.from_pretrained(folder)("the cat")["input_ids"]
    card = ModelCard.load(folder / "README.md")
    assert card.data.base_model == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert "corpus.jsonl" in card.text
    assert names[0] in card.text
    assert str(release) not in card.text, "its place there is not that of the release"
    assert str(tmp_path) not in card.text
    # the same files: another run of `make` gives the same archives
    assert content_of(release / archives[0]) == content_of(release / archives[1])


@pytest.mark.parametrize("missing", ["demo/align/draft", "direct/measure-t0.json"])
def test_a_missing_draft_or_measurement_is_one_line_and_leaves_older_archives(
    runs: Path, make: Make, missing: str
):
    (runs / "release").mkdir()
    (runs / "release/old").touch()
    (runs / missing).rename(runs / "moved")
    done = make()
    assert done.returncode == 2
    said = [line for line in done.stderr.splitlines() if not line.startswith("make: ")]
    (line,) = said
    assert line.startswith(f"{runs / missing} is missing; ")
    assert "make" in line
    assert (runs / "release/old").exists()
