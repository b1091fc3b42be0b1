"""Files of strangers run no code, start no program and name no key, unless the user permits it.

Each hostile file names code that leaves a marker. Files that are only read keep its name; files
that configure are refused in one line.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from paceline.bench.answers import family, setting
from paceline.decode.strategies import DecodingConfig
from paceline.engines.vllm_plugin import read_rule
from paceline.errors import ConfigError
from paceline.extensions import RuleChoice, imported
from paceline.permissions import IMPORTS, Origin
from paceline.tasks import build_task
from support.reports import bench_run
from support.texts import Run, refused, succeeded, write_yaml

RULE = {"import": "runs.tuned.notes:Rule", "alpha": 0.3}


@pytest.fixture
def marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What runs/tuned/notes.py of the working directory leaves when it is imported."""
    place = tmp_path / "runs" / "tuned"
    place.mkdir(parents=True)
    found = tmp_path / "marker"
    (place / "notes.py").write_text(f"open({str(found)!r}, 'w')\nclass Rule: pass\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return found


CONFIGURED = {
    "decode": {"strategy": {"rule": RULE}},
    "analyze": {"rules": [{"rule": "runs.tuned.notes:Rule"}]},
    "bench": {"grid": {"rules": ["runs.tuned.notes:Rule"]}},
    "tune": {"task": {"import": "runs.tuned.notes:Rule"}},
    "score": {"task": {"task": "pairs", "corpus": "x", "metric": "runs.tuned.notes:Rule"}},
    "align": {"objective": RULE},
}


@pytest.mark.parametrize("command", CONFIGURED)
def test_a_configuration_imports_nothing_by_itself(command: str, run: Run, marker: Path):
    file = write_yaml(marker.with_name("strange.yaml"), CONFIGURED[command])
    said = refused(run, "validate", command, file)
    assert "runs.tuned.notes:Rule is code" in said
    assert "--allow-import runs.tuned.notes" in said
    assert not marker.exists()


@pytest.mark.parametrize("permission", ["option", "environment"])
def test_what_the_user_permits_is_imported(
    permission: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    name = f"mine_{tmp_path.name}"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path(f"{name}.py").write_text(
        "from paceline.core.rules import Lossless\nclass R(Lossless): ..."
    )
    file = write_yaml(tmp_path / "d.yaml", {"strategy": {"rule": f"{name}:R"}})
    named = ["validate", "decode", "--set", f"strategy.rule={name}:R"]
    for words in (["validate", "decode", file], named):
        assert run(*words)[0] == 2
    if permission == "environment":
        monkeypatch.setenv(IMPORTS, f"another, {name}")
    option = ["--allow-import", name] if permission == "option" else []
    for words in (["validate", "decode", file], named):
        assert f"import: {name}:R" in succeeded(run, *words, *option)


def test_a_permission_for_an_installed_module_opens_no_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Libraries look for modules that are not installed, such as google, and would find them."""
    (tmp_path / "google_of_strangers.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])
    monkeypatch.setenv(IMPORTS, "paceline.core")
    with pytest.raises(ValueError, match="has no Rules"):
        imported("paceline.core.rules:Rules")
    assert find_spec("google_of_strangers") is None


def test_a_metric_is_a_function_of_the_permitted_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path(f"mine_{tmp_path.name}.py").write_text("from shutil import copyfile")
    monkeypatch.setenv(IMPORTS, f"mine_{tmp_path.name}")
    task = {"task": "pairs", "corpus": "x", "metric": f"mine_{tmp_path.name}:copyfile"}
    with pytest.raises(ConfigError, match="a function of another module, shutil"):
        build_task(task)


@pytest.mark.parametrize("name", ["a; touch HACKED #:b", "a.b", "a:b c", "a-b:c", "..a:b"])
def test_what_is_imported_has_names_of_python(name: str):
    with pytest.raises(ValueError, match=r"wants package\.module:Name"):
        imported(name)


def test_vllm_imports_nothing_by_itself(marker: Path):
    file = write_yaml(marker.with_name("decoding.yaml"), CONFIGURED["decode"])
    for value in (file, json.dumps(RULE)):
        with pytest.raises(SystemExit, match="PACELINE_IMPORTS"):
            read_rule(value)
    assert not marker.exists()


@pytest.mark.parametrize("place", ["row", "manifest"])
def test_a_report_shows_code_by_its_name_alone(place: str, run: Run, marker: Path):
    folder = bench_run(marker.parent / "got")
    file = folder / "rows.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    if place == "row":
        rows[1]["setting"] |= {"rule": RULE["import"], "family": RULE["import"]}
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        manifest = json.loads((folder / "manifest.json").read_text())
        manifest["config"]["grid"] = {"rules": [RULE], "temperatures": [1.0]}
        (folder / "manifest.json").write_text(json.dumps(manifest))
    for words in ([], ["--html", "page.html"]):
        code, out, err = run("report", folder, *words)
        assert code == 0, err
        assert place == "manifest" or "Rule" in out
    assert not marker.exists()


def test_a_rule_that_results_name_is_written_as_it_was_read():
    adapter = TypeAdapter(RuleChoice)
    rule = adapter.validate_python(RULE, context=Origin.RESULTS)
    assert adapter.dump_python(rule, mode="json") == RULE
    assert rule == adapter.validate_python(RULE, context=Origin.RESULTS)
    found = DecodingConfig.model_validate({"strategy": {"rule": RULE}}, context=Origin.RESULTS)
    assert found.model_dump(mode="json")["strategy"]["rule"] == RULE
    assert (family(found), setting(found)) == ("Rule", "alpha 0.3, gamma 4")


SHADOWS = ["yaml", "multiprocessing", "torch", "typer"]


def test_processes_import_nothing_from_the_working_directory(tmp_path: Path):
    """A worker of multiprocessing; the parent's path is without it."""
    for name in SHADOWS:
        (tmp_path / f"{name}.py").write_text(f"open('marker_{name}', 'w')")
    program = (
        "import multiprocessing, os, sys\n"
        "from paceline.cli import main\n"
        "sys.argv = ['paceline', '--version']\n"
        "try: main.main()\n"
        "except SystemExit: pass\n"
        "child = multiprocessing.get_context('spawn').Process(target=os.getcwd)\n"
        "child.start(); child.join(); sys.exit(child.exitcode)\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", program],
        cwd=tmp_path,
        env={key: value for key, value in os.environ.items() if key != "PYTHONSAFEPATH"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.glob("marker_*"))


def test_a_file_cannot_permit_that_programs_run(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    task = {"task": {"task": "code", "corpus": "x", "allow_execution": True}}
    words = [
        "validate",
        "bench",
        write_yaml(tmp_path / "f.yaml", task),
        *(f"--set={key}" for key in ("target=t", "draft=d", "output=o")),
    ]
    said = refused(run, *words)
    assert "a file may not allow that programs of a model run; if you want that, add --set " in said
    assert said.endswith("--set task.allow_execution=true")
    assert "allow_execution: true" in run(*words, "--set", "task.allow_execution=true")[1]
    monkeypatch.setenv("PACELINE_EXECUTION", "1")
    assert "allow_execution: true" in run(*words)[1]
