"""Files send no secret to a server and start no program, unless the user permits it."""

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from paceline.config import validate
from paceline.core.sampling import SamplingParams
from paceline.data.requests import GenerateDataConfig
from paceline.engines.client import Client, api_key
from paceline.engines.contract import Drafting, Request
from paceline.engines.kinds import SERVERS
from paceline.engines.text_servers import TextServers
from paceline.engines.texts import OpenAIWriter
from paceline.errors import ConfigError, EngineError, UsageError
from paceline.permissions import PROGRAMS, check_consent
from support.texts import Run, refused, write_yaml

URL = "https://api.openai.com"
WRITER = {"writer": {"kind": "openai", "url": URL, "api_key_env": "OPENAI_API_KEY"}}
ENGINE = {"engine": {"engine": "vllm", "url": URL, "api_key_env": "PACELINE_MY_KEY"}}


@pytest.mark.parametrize(
    ("command", "values"),
    [("generate-data", WRITER), ("score", WRITER), ("align", WRITER), ("measure-engine", ENGINE)],
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
    writer = {"kind": "engine", "engine": PROGRAM}
    values = {"target": "t", "prompts": "p", "output": "o", "writer": writer}
    assert GenerateDataConfig.model_validate(values).writer.kind == "engine"
    with pytest.raises(ConfigError, match="--allow-program"):
        validate(GenerateDataConfig, values)


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
