"""Odd paths, numbers and files: refused before the work, in one line with exit code 2."""

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


PAGED = ("measure", "verify", "decode", "align", "bench", "tune", "trajectory")


@pytest.mark.parametrize(
    ("command", "place"),
    [
        *((command, "{folder}") for command in PAGED),
        *(("measure", place) for place in ("{file}/page.html", "/dev/null")),
    ],
)
def test_a_page_that_cannot_be_written_is_refused_before_the_run(
    run: Run, pair_folder: Path, tmp_path: Path, command: str, place: str
):
    file, folder = tmp_path / "file", tmp_path / "folder"
    file.touch()
    folder.mkdir()
    page = place.format(file=file, folder=folder)
    given = {
        "measure": pair(pair_folder),
        "verify": pair(pair_folder),
        "decode": ("--target", pair_folder / "target", "--prompt", "the"),
    }
    assert f"--html {page}" in refused(run, command, *given.get(command, ()), "--html", page)


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


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("sampling.temperature", value) for value in (".nan", ".inf", "-.inf")),
        *((key, ".nan") for key in ("false_alarm", "tolerance")),
    ],
)
def test_a_number_that_is_not_finite_is_refused_with_its_key(run: Run, key: str, value: str):
    assert f"{key}: Input should be " in refused(run, "verify", "--set", f"{key}={value}")


def test_many_prompts_are_as_many_as_there_are(run: Run, pair_folder: Path):
    huge = ("--set", f"num_prompts={2**62}", "--set", "max_new_tokens=8", "--dry-run")
    assert run("measure", *pair(pair_folder), *huge)[0] == 0


@pytest.mark.parametrize("flag", [(), ("--dry-run",)])
def test_an_export_has_a_gamma_that_fits_the_context(
    run: Run, pair_folder: Path, tmp_path: Path, flag: tuple[str, ...]
):
    given = ("--target", pair_folder / "target", "--to", "vllm", "--out", tmp_path / "out")
    assert "gamma 63 does not fit the models' context of 64 tokens" in refused(
        run, "export", pair_folder / "draft", *given, "--gamma", "63", *flag
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("report nope --html a.html", "nope does not exist"),
        ("report notes", "notes is not JSON"),
        ("report other.json", "is not a result that has a report"),
        ("report .", ". holds no run"),
        ("measure --target  --draft d --prompts p", "--target is empty"),
        ("measure --target t --draft d --prompts ", "--prompts is empty"),
        ("decode --target  --prompt x", "got '' as a model"),
        ("perplexity --model m --text ", "--text is empty"),
        ("align --target t --draft d --output ", "--output is empty"),
        ("validate measure empty.yaml", "empty.yaml: target, "),
        ("perplexity --model {model} --text empty.parquet", "empty.parquet holds no text"),
        ("measure --engine vllm --url word --target t --draft d --prompts p", "'word' is not the"),
        (f"task arithmetic --out x.jsonl --count {10**20}", "is too large"),
        (f"verify --target t --draft d --prompts p --set num_cells={2**40}", "num_cells: "),
        ("corpus --out notes", "output notes is a file"),
        ("task arithmetic --out . --overwrite", "output . is a directory"),
    ],
)
def test_what_is_missing_or_empty_is_named(
    run: Run,
    pair_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: str,
    said: str,
):
    import pyarrow
    import pyarrow.parquet

    monkeypatch.chdir(tmp_path)
    Path("notes").write_text("text")
    Path("other.json").write_text("{}")
    Path("empty.yaml").touch()
    pyarrow.parquet.write_table(
        pyarrow.table({"text": pyarrow.array([], "string")}), "empty.parquet"
    )
    words = arguments.format(model=pair_folder / "target").split(" ")
    assert said in refused(run, *words)


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
    assert json.loads(out) == {"dry_run": True, "checks": lines, "examples": []}


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


def test_a_run_that_is_named_twice_is_refused(run: Run, tmp_path: Path, pair_folder: Path):
    (tmp_path / "link").symlink_to(tmp_path)
    runs = ("--run", tmp_path / "run", "--run", tmp_path / "link" / "run")
    given = ("--target", pair_folder / "target", "--output", tmp_path / "out")
    corpus = f"tasks.docs={pair_folder / 'corpus.jsonl'}"
    assert "are the same run" in refused(run, "trajectory", *given, *runs, "--set", corpus)


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
