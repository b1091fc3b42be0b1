"""Odd files, pages and caches: what is wrong with them is said, and what was measured is kept."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import StorageError
from paceline.records import storage_errors
from support.texts import Run, refused, succeeded

QUICK = ("--set", "max_new_tokens=8", "--set", "num_prompts=4", "--set", "timed_prompts=1")


def pair(folder: Path) -> tuple[Any, ...]:
    models = ("--target", folder / "target", "--draft", folder / "draft")
    return (*models, "--prompts", folder / "corpus.jsonl")


@pytest.mark.parametrize(
    ("command", "error"), [("measure", StorageError("no room")), ("verify", KeyError("section"))]
)
def test_a_page_that_fails_after_the_run_leaves_the_verdict(
    run: Run,
    pair_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    error: Exception,
):
    def fail(*_: object) -> None:
        raise error

    given = (*pair(pair_folder), "--set", "num_prompts=4", "--json")
    given += ("--set", "max_prompt_tokens=8", "--set", "max_new_tokens=40")
    wanted, out, _ = run(command, *given)
    verdict = json.loads(out)
    monkeypatch.setattr("paceline.view.render.write", fail)
    code, out, err = run(command, *given, "--html", tmp_path / "page.html")
    assert code == wanted
    assert json.loads(out).keys() == verdict.keys()
    *_, line = err.splitlines()
    assert str(error) in line


def test_many_prompts_are_as_many_as_there_are(run: Run, pair_folder: Path):
    huge = ("--set", f"num_prompts={2**62}", "--set", "max_new_tokens=8", "--dry-run")
    assert run("measure", *pair(pair_folder), *huge)[0] == 0


def test_a_result_may_begin_with_a_byte_order_mark(run: Run, pair_folder: Path, tmp_path: Path):
    code, out, _ = run("measure", *pair(pair_folder), *QUICK, "--json")
    assert code in (0, 1, 3)
    file = tmp_path / "measured.json"
    file.write_text("\ufeff" + out, encoding="utf-8")
    assert run("report", file)[0] == 0
    given = ("--target", pair_folder / "target", "--to", "vllm", "--measurement", file)
    assert run("export", pair_folder / "draft", *given, "--out", tmp_path / "out")[0] == 0


def _no_constant(name: str) -> float:
    pytest.fail(f"{name} is not JSON")


def test_an_unknown_bound_is_null_in_json(run: Run, pair_folder: Path):
    _, out, _ = run("measure", *pair(pair_folder), *QUICK, "--json")
    speedup = json.loads(out, parse_constant=_no_constant)["figures"][-1]["speedup"]
    assert (speedup["low"], speedup["high"]) == (0, None)


@pytest.mark.parametrize("command", ["measure", "verify", "analyze", "perplexity"])
def test_a_dry_run_prints_json_if_asked(run: Run, pair_folder: Path, command: str):
    given = (*pair(pair_folder), "--set", "max_prompt_tokens=8", "--set", "max_new_tokens=8")
    if command == "perplexity":
        given = ("--model", pair_folder / "target", "--text", pair_folder / "corpus.jsonl")
    out = succeeded(run, command, *given, "--dry-run")
    *lines, _ = out.splitlines()
    code, out, _ = run(command, *given, "--dry-run", "--json")
    assert code == 0
    assert json.loads(out) == {"dry_run": True, "checks": lines}


@pytest.mark.parametrize("name", ["manifest.json", "result.json"])
@pytest.mark.parametrize("text", ["{", "[]", "\udcff"])
def test_a_damaged_file_of_a_run_is_named(
    run: Run, pair_folder: Path, tmp_path: Path, name: str, text: str
):
    folder = tmp_path / "run"
    folder.mkdir()
    whole = {"kind": "Align", "config": {"draft": str(pair_folder / "draft")}}
    (folder / "manifest.json").write_text(json.dumps(whole))
    (folder / "result.json").write_text("{}")
    (folder / name).write_bytes(text.encode("utf-8", "surrogateescape"))
    given = ("--target", pair_folder / "target", "--output", tmp_path / "out")
    corpus = f"tasks.docs={pair_folder / 'corpus.jsonl'}"
    assert str(folder / name) in refused(
        run, "trajectory", *given, "--run", folder, "--set", corpus
    )


def test_an_entry_of_the_cache_that_cannot_be_written_names_its_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    for entry, said in (
        (tmp_path / "gguf" / "entry", "set PACELINE_CACHE to another directory and run again"),
        (tmp_path.parent / "entry", "choose another path and run again"),
    ):
        with pytest.raises(StorageError, match=said), storage_errors(entry):
            raise PermissionError(13, "Permission denied")


def test_a_process_whose_user_has_no_home_works(tmp_path: Path):
    code = (
        "import pwd, sys\n"
        "def getpwuid(user): raise KeyError(user)\n"
        "pwd.getpwuid = getpwuid\n"
        "from paceline.cli.main import main\n"
        "for wanted, *words in ((0, 'measure', '-h'), (2, 'env', '--wrong')):\n"
        "    sys.argv = ['paceline', *words]\n"
        "    try: main()\n"
        "    except SystemExit as end: assert end.code == wanted, words\n"
    )
    kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=kept, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
