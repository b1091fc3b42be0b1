"""The public surface, recorded: what users import and type. Add to it; never rename."""

import ast
import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
import typer.main
from record_surface import FILE, parameters, surface

import paceline
from paceline.cli.main import app
from paceline.core.rules import AnyRule, Rule

RECORDED: dict[str, Any] = json.loads(FILE.read_text("utf-8"))


@pytest.mark.parametrize("part", ["names", "signatures", "options"])
def test_the_surface_is_the_recorded_one(part: str):
    """After a change that is meant, run tools/golden/record_surface.py."""
    assert surface(RECORDED)[part] == RECORDED[part]


@pytest.mark.parametrize("rule", get_args(AnyRule))
@pytest.mark.parametrize("method", ["accept_at", "residual_at", "induced_at", "pi_at"])
def test_rules_share_one_signature(rule: type[Rule], method: str):
    assert parameters(getattr(rule, method)) == ["self", "at"]


def test_every_option_explains_itself():
    commands = typer.main.get_command(app).commands  # pyright: ignore
    options = [(verb, option) for verb in commands for option in commands[verb].params]
    assert [(verb, one.name) for verb, one in options if not getattr(one, "help", None)] == []


def test_help_does_not_wait_for_torch():
    """No clock: a command line that loads none of these answers in a fraction of a second."""
    heavy = "torch transformers accelerate datasets scipy numpy pandas huggingface_hub"
    program = (
        "import sys, typer.main, paceline.cli.main as cli; typer.main.get_command(cli.app); "
        f"print(*sorted(set({heavy.split()}) & set(sys.modules)))"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == ""


def imported_for_type_checkers() -> dict[str, Any]:
    """Names in the stub of the package, with the module that each comes from."""
    stub = Path(paceline.__file__).with_suffix(".pyi").read_text("utf-8")
    return {
        # only a name that is imported as itself is public to a type checker
        name.asname: node.module
        for node in ast.parse(stub).body
        if isinstance(node, ast.ImportFrom)
        for name in node.names
        if name.name == name.asname != "__version__"
    }


def test_the_package_offers_the_names_that_type_checkers_see():
    packages = {name for name, home in imported_for_type_checkers().items() if home == "paceline"}
    offered = imported_for_type_checkers().keys() - packages
    assert offered == set(paceline.__all__)
    public = {name for name in dir(paceline) if not name.startswith("__")}
    assert public == offered | packages | {"errors"}
    for name, home in imported_for_type_checkers().items():
        module = importlib.import_module(home)
        assert getattr(paceline, name) is getattr(module, name), name
        assert name not in packages or getattr(module, name).__name__ == f"paceline.{name}"
    with pytest.raises(AttributeError, match="no attribute 'teacher'"):
        paceline.teacher  # noqa: B018


def test_verbs_that_are_named_as_a_package_are_offered_under_a_name_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
):
    """`paceline.measure` is the package whatever was imported before."""
    names = ("measure", "export", "bench")
    for name in names:
        monkeypatch.delattr(paceline, name, raising=False)
    for _ in range(2):
        assert [getattr(paceline, name).__name__ for name in names] == [
            f"paceline.{name}" for name in names
        ]
        verbs = paceline.measure_draft, paceline.export_draft, paceline.run_bench
        assert [verb.__name__ for verb in verbs] == list(names)


def test_the_package_is_the_command_with_its_error_and_exit_code(tmp_path: Path):
    command = [sys.executable, "-m", "paceline", "validate", "nonsense", "missing.yaml"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr.startswith("paceline: 'nonsense' is not one of draft, ")
    assert run.stderr.count("\n") == 1
