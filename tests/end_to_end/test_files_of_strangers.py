"""Files of strangers run no code, start no program and name no key, unless the user permits it.

Each hostile file names code that leaves a marker. Files that are only read keep its name; files
that configure are refused in one line.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import yaml
from pydantic import TypeAdapter

from paceline.config import validate
from paceline.core.rules import RuleChoice
from paceline.core.sampling import SamplingParams
from paceline.data.requests import GenerateDataConfig
from paceline.decode.strategies import DecodingConfig, Speculative
from paceline.engines.client import Client, api_key
from paceline.engines.contract import Request
from paceline.engines.text_config import OpenAIWriter
from paceline.engines.text_servers import TextServers
from paceline.engines.vllm_plugin import read_rule
from paceline.errors import ConfigError, EngineError, UsageError
from paceline.permissions import IMPORTS, Origin, given
from paceline.tasks import build_task
from report_runs import bench_run

RULE = {"import": "runs.tuned.notes:Rule", "alpha": 0.3}
Run = Callable[..., tuple[int, str, str]]


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


def write(path: Path, values: Any) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(values))
    return str(path)


def refused(run: Run, *words: str) -> str:
    code, out, err = run(*words)
    assert (code, out) == (2, ""), err
    assert err.count("\n") == 1
    return err


STAGE = {
    "command": "bench",
    "outputs": ["$output/x/results.jsonl"],
    "minutes": {"cpu": 1, "gpu": 1},
}
CONFIGURED = {
    "decode": {"strategy": {"rule": RULE}},
    "analyze": {"rules": [{"rule": "runs.tuned.notes:Rule"}]},
    "bench": {"grid": {"rules": ["runs.tuned.notes:Rule"]}},
    "tune": {"task": {"import": "runs.tuned.notes:Rule"}},
    "score": {"task": {"task": "pairs", "corpus": "x", "metric": "runs.tuned.notes:Rule"}},
    "align": {"objective": RULE},
    "sweep": {"base": {"objective": RULE}, "rows": {"a": {}}, "columns": {"b": {}}, "output": "s"},
}


@pytest.mark.parametrize("command", CONFIGURED)
def test_a_configuration_imports_nothing_by_itself(command: str, run: Run, marker: Path):
    file = write(marker.with_name("strange.yaml"), CONFIGURED[command])
    said = refused(run, "validate", command, file)
    assert "runs.tuned.notes:Rule is code" in said
    assert "--allow-import runs.tuned.notes" in said
    assert not marker.exists()


def test_a_study_imports_nothing_by_itself(run: Run, marker: Path):
    stage = STAGE | {"disk_mb": 1, "set": {"grid.rules": [RULE], "output": "$output/x"}}
    file = write(
        marker.with_name("study.yaml"), {"title": "t", "output": "s", "stages": {"x": stage}}
    )
    assert "is code" in refused(run, "study", "run", file, "--dry-run")
    assert not marker.exists()


def test_a_directory_of_results_is_no_package_even_with_permission(run: Run, marker: Path):
    file = write(marker.with_name("d.yaml"), CONFIGURED["decode"])
    said = refused(run, "validate", "decode", file, "--allow-import", "runs")
    assert "directory without __init__.py" in said
    assert not marker.exists()


def test_code_that_lacks_the_class_is_not_run(run: Run, marker: Path):
    (marker.parent / "runs" / "__init__.py").touch()
    (marker.parent / "runs" / "tuned" / "__init__.py").touch()
    file = write(marker.with_name("d.yaml"), {"strategy": {"rule": "runs.tuned.notes:Other"}})
    assert "has no Other" in refused(run, "validate", "decode", file, "--allow-import", "runs")
    assert not marker.exists()


@pytest.mark.parametrize("permission", ["option", "environment", "command line"])
def test_what_the_user_permits_is_imported(
    permission: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    name = f"mine_{tmp_path.name}"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path(f"{name}.py").write_text(
        "from paceline.core.rules import Lossless\nclass R(Lossless): ..."
    )
    file = write(tmp_path / "d.yaml", {"strategy": {"rule": f"{name}:R"}})
    assert run("validate", "decode", file)[0] == 2
    if permission == "environment":
        monkeypatch.setenv(IMPORTS, f"another, {name}")
    words = ["validate", "decode", file]
    if permission == "option":
        words += ["--allow-import", name]
    if permission == "command line":
        words = ["validate", "decode", "--set", f"strategy.rule={name}:R"]
    code, out, err = run(*words)
    assert code == 0, err
    assert f"import: {name}:R" in out


@pytest.mark.parametrize("metric", ["cProfile:run", "os:system", "this:s"])
def test_the_standard_library_has_no_metrics(metric: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(IMPORTS, metric.partition(":")[0])
    with pytest.raises(ConfigError, match="is part of Python"):
        build_task(given({"task": "pairs", "corpus": "x", "metric": metric}))


def test_vllm_imports_nothing_by_itself(marker: Path):
    file = write(marker.with_name("decoding.yaml"), CONFIGURED["decode"])
    for value in (file, json.dumps(RULE)):
        with pytest.raises(SystemExit, match="PACELINE_IMPORTS"):
            read_rule(value)
    assert not marker.exists()


@pytest.mark.parametrize("place", ["row", "manifest"])
def test_a_report_shows_code_by_its_name_alone(place: str, run: Run, marker: Path):
    folder = bench_run(marker.parent / "got")
    file = folder / "results.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    if place == "row":
        rows[1]["decoding"]["strategy"]["rule"] = RULE
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        manifest = json.loads((folder / "manifest.json").read_text())
        manifest["config"]["grid"] = {"rules": [RULE], "temperatures": [1.0]}
        (folder / "manifest.json").write_text(json.dumps(manifest))
    for words in (["report", str(folder)], ["report", str(folder), "--html"]):
        code, out, err = run(*words)
        assert code == 0, err
        assert place == "manifest" or "Rule" in out
    assert not marker.exists()


def test_a_rule_that_results_name_is_written_as_it_was_read():
    adapter = TypeAdapter(RuleChoice)
    rule = adapter.validate_python(RULE, context=Origin.RESULTS)
    assert adapter.dump_python(rule, mode="json") == RULE
    assert rule == adapter.validate_python(RULE, context=Origin.RESULTS)
    assert rule != adapter.validate_python(RULE | {"alpha": 0.4}, context=Origin.RESULTS)
    assert (rule.name, repr(rule)) == ("Rule", "Rule(alpha=0.3)")
    found = DecodingConfig(strategy=Speculative(rule=rule))
    assert found.model_dump(mode="json")["strategy"]["rule"] == RULE


@pytest.mark.parametrize("key", ["accept", "__class__", "a b", "x or print()", "name"])
def test_settings_of_a_named_rule_are_names_of_fields(key: str):
    with pytest.raises(ValueError, match="is no name of a field"):
        TypeAdapter(RuleChoice).validate_python(RULE | {key: 1}, context=Origin.RESULTS)


SHADOWS = ["yaml", "multiprocessing", "torch", "typer"]


def test_processes_import_nothing_from_the_working_directory(tmp_path: Path):
    """A stage of a study, and a worker of multiprocessing; the parent's path is without it."""
    for name in SHADOWS:
        (tmp_path / f"{name}.py").write_text(f"open('marker_{name}', 'w')")
    program = (
        "import multiprocessing, os, sys\n"
        "from pathlib import Path\n"
        "from paceline.cli import main\n"
        "from paceline.studies.execute import LocalRunner\n"
        "if LocalRunner()(['--version'], Path('log')): sys.exit(Path('log').read_text())\n"
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


WRITER = {"writer": {"kind": "openai", "url": "https://example.invalid", "api_key_env": "AWS_KEY"}}
ENGINE = {"engine": {"engine": "vllm", "url": "https://example.invalid", "api_key_env": "AWS_KEY"}}


@pytest.mark.parametrize(
    ("command", "values"),
    [("generate-data", WRITER), ("score", WRITER), ("align", WRITER), ("measure-engine", ENGINE)],
)
def test_a_file_names_no_secret_of_the_user(command: str, values: Any, run: Run, tmp_path: Path):
    said = refused(run, "validate", command, write(tmp_path / "f.yaml", values))
    assert "a file may name OPENAI_API_KEY or PACELINE_..._KEY, not AWS_KEY" in said


@pytest.mark.parametrize("name", ["OPENAI_API_KEY", "PACELINE_MY_KEY", given("AWS_KEY")])
def test_the_user_names_any_variable_and_a_file_those_of_servers(name: str):
    values = {"url": "https://example.invalid", "api_key_env": name}
    assert validate(OpenAIWriter, values).api_key_env == name


def test_a_key_is_not_sent_without_encryption_to_another_machine(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    for url in ("http://example.invalid", "example.invalid:8000", "http://10.0.0.1"):
        with pytest.raises(UsageError, match="without encryption") as caught:
            api_key("OPENAI_API_KEY", [url])
        assert "secret" not in str(caught.value)
        with pytest.raises(UsageError, match="without encryption"):
            Client(url, "secret")
    for url in ("http://127.0.0.1:1", "http://localhost:1", "http://[::1]:1", "https://a.invalid"):
        assert api_key("OPENAI_API_KEY", [url]) == "secret"


PROGRAM = {"engine": "vllm", "program": "./evil.sh"}
OPTIONS = {"engine": "vllm", "options": ["--trust-remote-code"]}


@pytest.mark.parametrize("choice", [PROGRAM, OPTIONS])
def test_a_file_starts_no_program_by_itself(choice: Any, run: Run, tmp_path: Path):
    file = write(tmp_path / "f.yaml", {"engine": choice})
    program = choice.get("program", "vllm")
    for command in ("measure-engine", "bench"):
        said = refused(run, "validate", command, file)
        assert f"add --allow-program {program}" in said
    code, out, err = run("validate", "bench", file, "--allow-program", program, *NEEDED)
    assert code == 0, err
    assert "trust-remote-code" in out or "evil" in out
    written = [f"{key}={json.dumps(value)}" for key, value in choice.items()]
    words = [word for setting in written for word in ("--set", f"engine.{setting}")]
    assert run("validate", "bench", *words, *NEEDED)[0] == 0


NEEDED = [f"--set={key}" for key in ("target=t", "draft=d", "output=o", "task=arithmetic")]


def test_python_code_needs_no_permission():
    """Values that are not read from a file are the caller's own."""
    writer = {"kind": "engine", "engine": PROGRAM}
    values = {"target": "t", "prompts": "p", "output": "o", "writer": writer}
    assert GenerateDataConfig.model_validate(values).writer.kind == "engine"
    with pytest.raises(ConfigError, match="--allow-program"):
        validate(GenerateDataConfig, values)


def test_a_redirect_gets_no_key(monkeypatch: pytest.MonkeyPatch):
    asked: list[str] = []

    class Redirecting(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            models = json.dumps({"data": [{"id": "served"}]}).encode()
            is_known = self.path == "/v1/models"
            self.send_response(200 if is_known else 307)
            self.send_header("Location", "/elsewhere")
            self.send_header("Content-Length", str(len(models)))
            self.end_headers()
            self.wfile.write(models)

        do_POST = do_GET

        def log_message(self, format: str, *args: Any) -> None:
            del format, args

    server = ThreadingHTTPServer(("127.0.0.1", 0), Redirecting)
    Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    request = Request((1, 2), 4, SamplingParams(), 0)
    try:
        with pytest.raises(EngineError, match="307"):
            Client(url, "secret").get_text("/metrics")
        writer = OpenAIWriter(url=url, api_key_env="OPENAI_API_KEY")
        with pytest.raises(UsageError, match="307"):
            TextServers(writer, lambda _: [1]).write([request], lambda *_: None)
    finally:
        server.shutdown()
        server.server_close()
    assert "/v1/completions" in asked
    assert "/elsewhere" not in asked


def test_a_file_cannot_permit_that_programs_run(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    task = {"task": {"task": "code", "corpus": "x", "allow_execution": True}}
    words = ["validate", "bench", write(tmp_path / "f.yaml", task), *NEEDED[:3]]
    assert "allow_execution: false" in run(*words)[1]
    assert "allow_execution: true" in run(*words, "--set", "task.allow_execution=true")[1]
    monkeypatch.setenv("PACELINE_EXECUTION", "1")
    assert "allow_execution: true" in run(*words)[1]
