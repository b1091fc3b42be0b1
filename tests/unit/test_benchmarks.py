"""The scripts in benchmarks, which `make test` does not run: what they import, and gpu.py."""

import ast
import importlib
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
SCRIPTS = sorted(FOLDER.glob("*.py"))


@pytest.fixture(autouse=True)
def _beside_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))


@pytest.fixture
def gpu() -> Any:
    return importlib.import_module("gpu")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_every_name_that_a_script_imports_from_this_repository_exists(script):
    scripts = {path.stem for path in SCRIPTS}
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            if node.module.partition(".")[0] not in {"paceline", *scripts}:
                continue
            module = importlib.import_module(node.module)
            for name in (alias.name for alias in node.names):
                if not hasattr(module, name):
                    importlib.import_module(f"{node.module}.{name}")


def test_a_failing_part_ends_alone(gpu, monkeypatch, capsys):
    def failing(*_: Any) -> None:
        raise RuntimeError("no kernel")

    model = Namespace()
    pair = gpu.Pair("tiny", (model, model), (model, model))
    seen: list[str] = []
    monkeypatch.setattr(gpu, "made_pair", lambda *_: pair)
    reports = {"trl": failing, "static": lambda *_: seen.append("static")}
    monkeypatch.setattr(gpu, "REPORTS", reports)
    options = Namespace(part=["trl", "static"], rows=None)
    assert not gpu.report_shape("tiny", ["trl", "static"], options, gpu.Results())
    assert seen == ["static"]
    assert "tiny  trl: RuntimeError: no kernel" in capsys.readouterr().out
    monkeypatch.setattr(gpu, "REPORTS", {"static": failing})
    assert not gpu.report_shape("tiny", ["static"], options, gpu.Results())
    assert "in failing" in capsys.readouterr().err, "the traceback of a part of ours"
