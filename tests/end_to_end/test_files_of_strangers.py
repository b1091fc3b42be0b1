"""Files of strangers run no code, start no program and name no key, unless the user permits it.

Each hostile file names code that leaves a marker. Files that are only read keep its name; files
that configure are refused in one line.
"""

import json
import os
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from pydantic import TypeAdapter

from paceline.bench.answers import family, setting
from paceline.config import validate
from paceline.core.sampling import SamplingParams
from paceline.decode.strategies import DecodingConfig
from paceline.engines.client import Client, api_key
from paceline.engines.contract import Drafting, Request
from paceline.engines.kinds import SERVERS
from paceline.engines.text_servers import TextServers
from paceline.engines.texts import OpenAIWriter
from paceline.engines.vllm_plugin import read_rule
from paceline.errors import ConfigError, EngineError, UsageError
from paceline.extensions import RuleChoice, imported
from paceline.measure.served import ServedConfig
from paceline.permissions import IMPORTS, PROGRAMS, Origin, check_consent
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


URL = "https://api.openai.com"
WRITER = {"writer": {"kind": "openai", "url": URL, "api_key_env": "OPENAI_API_KEY"}}
ENGINE = {"engine": {"engine": "vllm", "url": URL, "api_key_env": "PACELINE_MY_KEY"}}


@pytest.mark.parametrize(
    ("command", "values"),
    [("generate-data", WRITER), ("score", WRITER), ("measure-engine", ENGINE)],
)
def test_a_file_sends_no_key_of_the_user(command: str, values: Any, run: Run, tmp_path: Path):
    said = refused(run, "validate", command, write_yaml(tmp_path / "f.yaml", values))
    ((part, settings),) = values.items()
    assert f"a file may not send the key in {settings['api_key_env']}, or name who gets it" in said
    run_of = tmp_path / "run"
    run_of.mkdir()
    (run_of / "manifest.json").write_text(json.dumps({"config": values}))
    if command == "generate-data":  # the configuration of a run that is resumed is a file, too
        resumed = ("generate-data", "--resume", "--output", str(run_of), "--dry-run")
        assert "a file may not send the key in OPENAI_API_KEY" in refused(run, *resumed)
    file, key = tmp_path / "f.yaml", "NO_SUCH_KEY"
    words = ["validate", command, file, "--set", f"{part}.api_key_env={key}"]
    assert f"a file may not send the key in {key}" in refused(run, *words), "to the file's server"
    for url in (URL, "https://another.invalid"):  # the command line names the server, too
        out, err = run(*words, "--set", f"{part}.url={url}")[1:]
        assert "may not send" not in err
        assert url in out or not out


def test_a_list_of_a_file_names_no_key():
    with pytest.raises(ConfigError, match=r"add --set writers\.1\.api_key_env=A --set"):
        check_consent({"writers": [{}, {"url": URL, "api_key_env": "A"}]}, {"writers": [{}]})


def test_a_key_is_not_sent_without_encryption_to_another_machine(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    for url in ("http://example.invalid", "example.invalid:8000", "http://10.0.0.1"):
        with pytest.raises(UsageError, match="without encryption") as caught:
            api_key("OPENAI_API_KEY", [url])
        assert "secret" not in str(caught.value)
    for url in ("http://127.0.0.1:1", "http://localhost:1", "http://[::1]:1", "https://a.invalid"):
        assert api_key("OPENAI_API_KEY", [url]) == "secret"


@pytest.mark.parametrize(
    "text",
    [
        "engine: {engine: llamacpp, program: !!binary Li9ldmlsLnNo}",
        "engine: {engine: vllm, options: !!set {--trust-remote-code}}",
        "engine: {engine: vllm, options: [!!binary LS10]}",
        "engine: {engine: vllm, url: 'https://a.invalid', api_key_env: !!binary QVdTX0tFWQ==}",
        "engine: {engine: vllm, options: !!omap [a: b]}",
    ],
)
def test_a_value_of_another_type_is_permitted_no_more_than_a_text(
    text: str, run: Run, tmp_path: Path
):
    (tmp_path / "f.yaml").write_text(text)
    said = refused(run, "validate", "measure-engine", str(tmp_path / "f.yaml"))
    assert "a file may not" in said


def test_a_model_is_no_option_of_an_engine():
    for server in SERVERS:
        with pytest.raises(UsageError, match="would be an option"):
            server.models("--config=evil.yaml", None)
        with pytest.raises(UsageError, match="would be an option"):
            server.models("target", Drafting("-evil", 2))


PROGRAM = {"engine": "vllm", "program": "./evil.sh"}
OPTIONS = {"engine": "vllm", "options": ["--trust-remote-code"]}


@pytest.mark.parametrize("choice", [PROGRAM, OPTIONS])
def test_a_file_starts_no_program_by_itself(
    choice: Any, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    file = write_yaml(tmp_path / "f.yaml", {"engine": choice})
    program = choice.get("program", "vllm")
    for command in ("measure-engine", "bench"):
        said = refused(run, "validate", command, file)
        assert f"add --allow-program {program}" in said
    code, out, err = run("validate", "bench", file, "--allow-program", program, *NEEDED)
    assert code == 0, err
    assert "trust-remote-code" in out or "evil" in out
    written = [f"{key}={json.dumps(value)}" for key, value in choice.items()]
    words = [word for setting in written for word in ("--set", f"engine.{setting}")]
    monkeypatch.setenv(PROGRAMS, "")
    assert "--allow-program" in refused(run, "validate", "bench", *words, *NEEDED)
    monkeypatch.setenv(PROGRAMS, program)
    for given in (words, [file]):
        assert run("validate", "bench", *given, *NEEDED)[0] == 0


NEEDED = [f"--set={key}" for key in ("target=t", "draft=d", "output=o", "task=arithmetic")]


def test_python_code_needs_no_permission():
    """Values that are not read from a file are the caller's own."""
    values = {"target": "t", "draft": "d", "prompts": "p", "engine": PROGRAM}
    assert ServedConfig.model_validate(values).engine.program == PROGRAM["program"]
    with pytest.raises(ConfigError, match="--allow-program"):
        validate(ServedConfig, values)


def test_a_redirect_gets_no_key_and_a_server_nothing_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
):
    asked: list[str] = []
    sent: set[str] = set()

    class Redirecting(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            sent.update(self.headers.values())
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
    monkeypatch.setenv("OPENAI_ORG_ID", "organisation")  # the client would add it
    monkeypatch.setenv("OPENAI_CUSTOM_HEADERS", "X-Mine: mine")
    request = Request((1, 2), 4, SamplingParams(), 0)
    try:
        with pytest.raises(EngineError, match="307"):
            Client(url, "secret").ask("GET", "/metrics")
        writer = OpenAIWriter(url=url, api_key_env="OPENAI_API_KEY")
        with pytest.raises(UsageError, match="307"):
            TextServers(writer, lambda _: [1]).write([request], lambda *_: None)
    finally:
        server.shutdown()
        server.server_close()
    assert "/v1/completions" in asked
    assert "/elsewhere" not in asked
    assert "Bearer secret" in sent
    assert not {"organisation", "mine"} & sent
