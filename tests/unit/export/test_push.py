"""An export on the hub: what huggingface_hub sends to a server on this machine, and the card."""

import base64
import json
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import ModelCard

from paceline.config import validate
from paceline.errors import EngineError, UsageError
from paceline.export import ExportConfig, Exported, export
from paceline.measure import MeasureConfig, measure
from paceline.records import RunDirectory
from paceline.train import align
from support.runs import align_config

TOKEN = "hf_of_a_test"


class Hub(ThreadingHTTPServer):
    """The part of the hub's interface that a push uses; keeps what it gets."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.may_write = True
        self.fault = ""  # that it finds in a card
        self.is_private: dict[str, bool] = {}
        self.files: dict[str, dict[str, bytes]] = {}


class _Answers(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_: Any) -> None:
        """Nothing on stderr."""

    def answer(self, value: Any, status: int = 200, **headers: str) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        for name, text in headers.items():
            self.send_header(name.replace("_", "-"), text)
        self.end_headers()
        self.wfile.write(content)

    def allowed(self) -> bool:
        return self.headers["Authorization"] == f"Bearer {TOKEN}"

    def do_GET(self) -> None:
        if not self.allowed():
            return self.answer({"error": "Invalid credentials"}, 401)
        if self.path == "/api/whoami-v2":
            return self.answer({"name": "someone", "type": "user"})
        name, tree, _ = self.path.removeprefix("/api/models/").partition("/tree/main")
        if name not in self.server.is_private:
            return self.answer({"error": "not found"}, 404, X_Error_Code="RepoNotFound")
        if tree:
            files = self.server.files.get(name, {})
            entry = {"type": "file", "size": 1, "oid": "0"}
            return self.answer([{"path": path, **entry} for path in files])
        return self.answer({"_id": "1", "id": name, "private": self.server.is_private[name]})

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        if not (self.allowed() and self.server.may_write):
            return self.answer({"error": "You have no rights"}, 403)
        if self.path == "/api/repos/create":
            given = json.loads(content)
            name = f"{given['organization'] or 'someone'}/{given['name']}"
            self.server.is_private.setdefault(name, given.get("visibility") == "private")
            return self.answer({"url": f"{self.server.url}/{name}"})
        if "/preupload/" in self.path:
            paths = [one["path"] for one in json.loads(content)["files"]]
            plain = {"uploadMode": "regular", "shouldIgnore": False}
            return self.answer({"files": [{"path": path, **plain} for path in paths]})
        if "/commit/" in self.path:
            name = self.path.removeprefix("/api/models/").partition("/commit/")[0]
            for line in map(json.loads, content.splitlines()):
                if line["key"] == "deletedFile":
                    del self.server.files[name][line["value"]["path"]]
                if line["key"] == "file":
                    kept = self.server.files.setdefault(name, {})
                    kept[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            return self.answer(
                {"commitUrl": f"{self.server.url}/{name}/commit/1", "commitOid": "1"}
            )
        assert self.path == "/api/validate-yaml"
        errors = [{"message": self.server.fault}] if self.server.fault else []
        return self.answer({"errors": errors, "warnings": []}, 400 if errors else 200)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", server.url)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def pushed(folder: Path, out: Path, **changes: Any) -> Exported:
    values = {"model": folder / "draft", "target": folder / "target", "out": out, "to": "vllm"}
    texts = {key: str(value) for key, value in values.items()}
    return export(validate(ExportConfig, texts | {"push": "lab/draft"} | changes))


def test_a_push_sends_the_files_of_the_export_to_a_private_repository(
    folder: Path, tmp_path: Path, hub: Hub
):
    found = pushed(folder, tmp_path / "out")
    assert found.pushed == f"{hub.url}/lab/draft"
    assert hub.is_private == {"lab/draft": True}
    there = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert hub.files == {"lab/draft": there}
    again = pushed(folder, tmp_path / "again", private=False, push="other")
    assert (again.pushed, hub.is_private["someone/other"]) == (f"{hub.url}/someone/other", False)


def test_a_push_removes_what_an_older_export_would_add_to_the_model(
    folder: Path, tmp_path: Path, hub: Hub
):
    older = ("draft_vocabulary.json", "model-00001-of-00002.safetensors", "added_tokens.json")
    others = (".gitattributes", "results.json", "another/draft_vocabulary.json", "old-q8_0.gguf")
    hub.is_private["lab/draft"] = True
    hub.files["lab/draft"] = dict.fromkeys((*older, *others, "config.json"), b"old")
    pushed(folder, tmp_path / "out")
    there = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert hub.files["lab/draft"] == there | dict.fromkeys(others, b"old")
    hub.files["lab/draft"] = dict.fromkeys((*older, *others), b"old")
    pushed(folder, tmp_path / "file", to="llamacpp")  # a file that is read alone
    assert {*older, *others, "file-f32.gguf"} <= {*hub.files["lab/draft"]}


def test_a_card_that_the_hub_refuses_is_one_line(folder: Path, tmp_path: Path, hub: Hub):
    hub.fault = '"license" must be one of [apache-2.0, mit]'
    out = tmp_path / "out"
    said = rf'^--push lab/draft: [^\n]*README\.md[^\n]*"license" must be one of[^\n]* is in {out}$'
    with pytest.raises(EngineError, match=said):
        pushed(folder, out)
    assert (out / "README.md").exists()


def test_a_private_export_is_not_pushed_into_a_public_repository(
    folder: Path, tmp_path: Path, hub: Hub
):
    hub.is_private["lab/draft"] = False
    with pytest.raises(UsageError, match=r"lab/draft exists on the hub and is public; .*--no-priv"):
        pushed(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    pushed(folder, tmp_path / "out", private=False)
    assert "config.json" in hub.files["lab/draft"]


def test_what_stops_a_push_is_one_line(
    folder: Path, tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
):
    out = tmp_path / "out"
    with pytest.raises(UsageError, match=r"^--push a/b/c names no repository: [^\n]*$"):
        pushed(folder, out, push="a/b/c")
    monkeypatch.setenv("HF_TOKEN", "hf_of_another")
    with pytest.raises(UsageError, match=r"^--push lab/draft: the token is not valid [^\n]*$"):
        pushed(folder, out)
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(UsageError, match=r"^--push lab/draft needs a token of the hub; [^\n]*$"):
        pushed(folder, out)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(EngineError, match=r"^--push lab/draft: the hub cannot be reached [^\n]*$"):
        pushed(folder, out)
    assert not out.exists()  # all of these are found before the export
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.url)
    hub.may_write = False
    with pytest.raises(
        UsageError, match=rf"no right to write there [^\n]*; the export is in {out}$"
    ):
        pushed(folder, out)
    assert (out / "config.json").exists()


@pytest.mark.slow
def test_the_card_has_what_the_hub_reads(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """As huggingface_hub reads it: target, its relation, data set, figures of the measurement."""
    commit = "0" * 40
    repository = tmp_path / "hub" / "models--lab--target"
    shutil.copytree(folder / "target", repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    run = RunDirectory(align(align_config(folder, tmp_path / "run", target="lab/target")))
    manifest = json.loads(run.manifest.read_text())
    manifest["config"]["data"]["train"]["path"] = "lab/texts"
    del manifest["inputs"]["data.train"]  # texts of the hub have no fingerprint
    run.manifest.write_text(json.dumps(manifest))
    draft = str(run.path / "draft")
    small = {"num_prompts": 3, "max_prompt_tokens": 4, "max_new_tokens": 8, "pass_repeats": 1}
    models = {"target": "lab/target", "draft": draft, "prompts": str(folder / "corpus.jsonl")}
    greedy = {"draft_sampling": {"temperature": 0}, "timed_prompts": 2, "gammas": [2]}
    found = measure(validate(MeasureConfig, {**models, **small, **greedy}))
    (tmp_path / "m.json").write_text(found.model_dump_json())
    named = {"model": draft, "target": "lab/target", "measurement": str(tmp_path / "m.json")}
    pushed(folder, tmp_path / "out", push=None, **named)
    card = ModelCard.load(tmp_path / "out" / "README.md").data
    assert (card.base_model, card["base_model_relation"]) == ("lab/target", "finetune")
    assert card.datasets == ["lab/texts"]
    figures = {one.metric_type: one for one in card.eval_results or ()}
    values = json.loads((tmp_path / "m.json").read_text())
    acceptance = values["acceptance"]["expected_acceptance"]["value"]
    assert figures["expected_acceptance"].metric_value == pytest.approx(acceptance, abs=5e-5)
    assert figures["expected_acceptance"].dataset_name == "corpus.jsonl"
    speedup = values["speed"]["speedup"]["value"]
    assert figures["speedup"].metric_value == pytest.approx(speedup, abs=5e-5)
    assert figures["speedup"].metric_name == "speedup, gamma 2"
