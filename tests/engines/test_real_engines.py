"""The demo's draft in the engines themselves: `make engines` sets them up and runs this.

`make test` leaves these out; there, small servers that answer as the engines do meet the same code
(`tests/unit/test_measure_served.py`).
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.main import main

pytestmark = pytest.mark.engines

FOLDER = Path(os.environ.get("PACELINE_ENGINES", ".engines"))
DEMO = Path(os.environ.get("PACELINE_DEMO", "runs/demo"))
TARGET = Path(".cache/SmolLM2-135M-Instruct.Q4_1.gguf")
DRAFT = DEMO / "align" / "draft"
PROGRAMS = {"vllm": FOLDER / "vllm/bin/vllm", "llamacpp": FOLDER / "llama-server"}
OPTIONS = {
    "vllm": ["--enforce-eager", "--no-enable-prefix-caching"],
    "llamacpp": ["-t", "2"],
}
GAMMA = 3

Run = Callable[..., tuple[int, str, str]]


def needs(*engines: str) -> pytest.MarkDecorator:
    missing = [name for name in engines if not PROGRAMS[name].exists()]
    missing += [] if DRAFT.exists() and TARGET.exists() else ["the demo's models"]
    return pytest.mark.skipif(
        bool(missing), reason=f"{', '.join(missing)} not here; make engines sets it up"
    )


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: Any) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["paceline", *map(str, arguments)])
        monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "2")
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        with pytest.raises(SystemExit) as stop:
            main()
        captured = capsys.readouterr()
        assert isinstance(stop.value.code, int)
        return stop.value.code, captured.out, captured.err

    return call


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("exports")


def export(run: Run, out: Path, model: Path, to: str, *more: str) -> str:
    """The path that the engine is given."""
    code, text, err = run("export", model, "--to", to, "--out", out, "--json", *more)
    assert code == 0, err
    return json.loads(text)["path"]


def served(
    run: Run, engine: str, target: str, draft: str, count: int, *more: str
) -> dict[str, Any]:
    code, out, err = run(
        *("measure", "--engine", engine, "--target", TARGET, "--draft", DRAFT),
        *("--prompts", DEMO / "data" / "prompts.jsonl", "--set", "max_prompt_tokens=32"),
        *(
            "--set",
            f"engine.program={PROGRAMS.get(engine, '')}",
            "--set",
            f"engine.target={target}",
        ),
        *(
            "--set",
            f"engine.draft={draft}",
            "--set",
            f"engine.options={json.dumps(OPTIONS[engine])}",
        ),
        *("--set", f"num_prompts={count}", "--set", f"num_speculative_tokens={GAMMA}"),
        *("--set", "dtype=float32", "--temperature", "0", "--json", *more),
    )
    assert code in (0, 1), err
    return json.loads(out)


@needs("vllm")
def test_vllm_with_the_draft_writes_what_it_writes_without(run: Run, exported: Path):
    """float32, 20 prompts, greedy."""
    target = export(run, exported / "vllm-target", TARGET, "vllm")
    draft = export(run, exported / "vllm", DRAFT, "vllm", "--target", str(TARGET))
    found = served(run, "vllm", target, draft, 20)
    assert found["speed"]["num_equal"] == found["num_requests"] == 20


@needs("vllm")
def test_vllm_accepts_what_was_predicted_by_position(run: Run, exported: Path):
    """64 prompts, greedy drafts."""
    target = export(run, exported / "vllm-target64", TARGET, "vllm")
    draft = export(run, exported / "vllm64", DRAFT, "vllm", "--target", str(TARGET))
    found = served(run, "vllm", target, draft, 64, "--set", "plain=false")
    assert found["agreement"]["agrees"], found["agreement"]["reason"]


@needs("llamacpp")
def test_llama_server_accepts_what_was_predicted_by_position(run: Run, exported: Path):
    """64 prompts, greedy drafts; both models as float32 GGUF files."""
    more = ("--dtype", "float32")
    target = export(run, exported / "gguf-target", TARGET, "llamacpp", *more)
    draft = export(run, exported / "gguf", DRAFT, "llamacpp", "--target", str(TARGET), *more)
    found = served(run, "llamacpp", target, draft, 64)
    assert found["agreement"]["agrees"], found["agreement"]["reason"]
    assert found["speed"]["num_equal"] >= 0.95 * found["num_requests"]


@needs()
def test_transformers_accepts_what_was_predicted_by_position(run: Run):
    code, out, err = run(
        *("measure", "--engine", "transformers", "--target", TARGET, "--draft", DRAFT),
        *("--prompts", DEMO / "data" / "prompts.jsonl", "--set", "max_prompt_tokens=32"),
        *(
            "--set",
            f"num_speculative_tokens={GAMMA}",
            "--set",
            "dtype=float32",
            "--temperature",
            "0",
        ),
        "--json",
    )
    assert code == 0, err
    found = json.loads(out)
    assert found["speed"]["num_equal"] == found["num_requests"]
