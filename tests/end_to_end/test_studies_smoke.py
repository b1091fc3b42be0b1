"""Every study of the repository at the smoke scale, its stages through the command line.

Claims of the study are judged on its rows, so that a claim that names a setting or a sum which the
study does not have fails here.
"""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from threading import Lock

import pytest

from paceline.config import validate
from paceline.results.row import read_rows
from paceline.studies.claim_file import ClaimFile, read_claims
from paceline.studies.session import run_and_judge
from paceline.studies.study_file import find_studies, read_study
from paceline.train.sweep import SweepConfig, sweep
from support.models import tiny_pair
from support.processes import run_command
from support.runs import align_config, held_out, write_corpus, write_pair

ROOT = Path(__file__).parents[2]
STUDIES = find_studies(ROOT / "configs/studies")
WORDS = "one two three four five six seven eight nine ten red blue green the an in".split()  # noqa: SIM905

pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def garden(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Values of the variables of studies: tiny T5 models, pairs of two tasks, and a tiny llama.

    A variable whose name is another, such as `aligned`, is an alias below.
    """
    folder = write_pair(tmp_path_factory.mktemp("garden"), architecture="t5_v1_1")
    _, medium = tiny_pair("t5_v1_1", d_ff=64)
    medium.hf.save_pretrained(folder / "medium")
    assert medium.tokenizer is not None
    medium.tokenizer.save_pretrained(folder / "medium")
    data = folder / "data"
    data.mkdir()
    texts = [f"{one} {two}" for one in WORDS for two in WORDS]
    for task in ("translation", "summaries"):
        for split, part in (("train", texts[::2]), ("test", texts[1::2])):
            rows = [{"prompt": text, "completion": text[::-1]} for text in part]
            write_corpus(data / f"{task}_{split}.jsonl", rows)
    models = {name: folder / name for name in ("target", "medium", "draft")}
    sums = write_pair(tmp_path_factory.mktemp("sums"), max_position_embeddings=256)
    return {
        **models,
        "data": data,
        "aligned": folder / "draft",
        "sums_target": sums / "target",
        "sums_draft": sums / "draft",
        "sums": _sums(tmp_path_factory.mktemp("texts_of_sums")),
        "chat": sums / "target",
        "texts": _texts_of_direct_alignment(tmp_path_factory.mktemp("texts")),
    }


@pytest.fixture(scope="session")
def grids(garden: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Sweeps of four drafts by variable: two kinds of text, two seeds."""
    objectives = {"kl": "forward_kl", "bounded": "tvd"}
    return {
        name: _grid(garden, tmp_path_factory.mktemp("grid") / name, objective)
        for name, objective in objectives.items()
    }


def _grid(garden: dict[str, Path], output: Path, objective: str) -> Path:
    folder = garden["data"].parent
    corpus = str(garden["data"] / "summaries_train.jsonl")
    judged = held_out(folder, max_prompt_tokens=32)
    made = align_config(folder, output, num_steps=2, max_prompt_tokens=32, **judged)
    run = made.model_dump(mode="json")
    base = {key: run[key] for key in run if key not in ("output", "seed", "objective")}
    base["data"] |= {"train": corpus, "held_out": corpus}
    values = {
        "output": str(output),
        "base": base,
        "rows": {objective: {"objective": objective}},
        "columns": {"fixed": {"fixed_fraction": 1.0}, "target": {"fixed_fraction": 0.0}},
        "seeds": [0, 1],
    }
    sweep(validate(SweepConfig, values))
    return output


def _sums(folder: Path) -> Path:
    for split, words in (("train", WORDS[:8]), ("test", WORDS[1:8])):
        rows = [{"prompt": f"{one} {two}", "completion": two} for one in words for two in words]
        write_corpus(folder / f"{split}.jsonl", rows)
    return folder


def _texts_of_direct_alignment(folder: Path) -> Path:
    """Files as `corpus` writes them; a vocabulary of one kind of text each."""
    for name, words in (("beginnings", WORDS[:8]), ("code_train", WORDS[8:])):
        texts = [f"{one} {two} {three}" for one in words for two in words for three in words]
        write_corpus(folder / f"{name}.jsonl", [{"text": text} for text in texts])
    for name, words in (("prompts", WORDS[1:8]), ("code", WORDS[9:])):
        texts = [f"{one} {two} {one} {two}" for one in words for two in words]
        write_corpus(folder / f"{name}.jsonl", [{"text": text} for text in texts])
    for name, words in (("pretraining", WORDS), ("held_out", WORDS[::-1])):
        texts = [" ".join([*words[place:], *words[:place]]) for place in range(len(words))]
        write_corpus(folder / f"{name}.jsonl", [{"text": text} for text in texts])
    return folder


@cache
def claims() -> ClaimFile:
    return read_claims()


class InThisProcess:
    """Runs stages one after the other, without the imports of processes of their own."""

    def __init__(self) -> None:
        self._lock = Lock()  # a study starts several stages at once

    def __call__(self, command: Sequence[str], log: Path) -> int:
        with self._lock:
            done = run_command(ROOT, *command)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a", encoding="utf-8") as stream:
            stream.write(done.stdout + done.stderr)
        return done.returncode

    def stop(self) -> None:
        """Every command has ended."""


@pytest.mark.first
@pytest.mark.parametrize("name", STUDIES)
def test_a_study_runs_and_its_claims_find_their_rows(
    name: str,
    garden: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
):
    monkeypatch.chdir(ROOT)  # studies name configurations from there
    study = read_study(STUDIES[name])
    known = dict(garden)
    if "kl" in study.variables:
        known |= request.getfixturevalue("grids")
    assert study.variables.keys() <= known.keys(), "make these in the fixture"
    own = {variable: str(known[variable]) for variable in study.variables}
    study = study.model_copy(update={"variables": own, "output": tmp_path / "study"})
    rows, found = run_and_judge(study, name, "smoke", runner=InThisProcess())
    findings = {one.claim.id: one for one in found}
    assert findings.keys() == {one.id for one in claims().claims if one.study == name}
    # the smoke scale has fewer families and settings, so that a side may have no rows
    wrong = {key: one.reason for key, one in findings.items() if "name " in one.reason}
    assert wrong == {}, "these claims name sums that rows lack, or leave settings open"
    assert rows == read_rows(tmp_path / "study/rows.jsonl")
    items = {item for stage in study.stages.values() for item in stage.covers}
    assert {item for row in rows for item in row.covers} <= items
    assert {row.study for row in rows} == {name}
