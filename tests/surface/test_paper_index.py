"""docs/paper_index.md, docs/notation.md and the `Paper:` lines of docstrings stay in step."""

import ast
import importlib
import pkgutil
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import typer.main

from paceline.cli.main import app

ROOT = Path(__file__).parents[2]
INDEX = ROOT / "docs/paper_index.md"
SOURCES = sorted((ROOT / "src/paceline").rglob("*.py"))
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef)


class Row(NamedTuple):
    item: str
    code: list[str]
    tests: list[str]
    commands: list[str]


def rows() -> Iterator[Row]:
    for line in INDEX.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and cells[0] not in {"item", "---"}:
            item, *others = cells
            yield Row(item, *(re.findall(r"`([^`]+)`", cell) for cell in others))


ROWS = list(rows())


def resolves(dotted: str) -> bool:
    """Whether a dotted name is a module, or something in one."""
    parts = dotted.split(".")
    for cut in range(len(parts), 0, -1):
        module = ".".join(parts[:cut])
        try:
            importlib.import_module(module)
        except ModuleNotFoundError:
            continue
        try:
            pkgutil.resolve_name(f"{module}:{'.'.join(parts[cut:])}" if parts[cut:] else module)
        except AttributeError:
            # a dataclass field or an attribute that only instances have
            owner = pkgutil.resolve_name(f"{module}:{'.'.join(parts[cut:-1])}")
            return parts[-1] in getattr(owner, "__annotations__", {})
        return True
    return False


def with_paper_line() -> Iterator[str]:
    """Dotted names of public modules, classes, functions and methods whose docstring has one."""
    for path in SOURCES:
        module = ".".join(path.relative_to(ROOT / "src").with_suffix("").parts)
        yield from _search(ast.parse(path.read_text(encoding="utf-8")), module)


def _search(node: ast.AST, name: str) -> Iterator[str]:
    if isinstance(node, DOCUMENTED) and "Paper:" in (ast.get_docstring(node) or ""):
        yield name.removesuffix(".__init__")
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef) and not child.name.startswith("_"):
            yield from _search(child, f"{name}.{child.name}")


@cache
def functions_in(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_every_paper_line_is_in_the_index():
    indexed = {name for row in ROWS for name in row.code}
    assert sorted(set(with_paper_line()) - indexed) == []


def test_every_paper_line_names_author_year_and_place():
    form = re.compile(r"Paper: (ours\.|[A-Z]\w+ (et al\. |and \w+ )?\d{4}, \S)")
    wrong = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in SOURCES
        for line in path.read_text(encoding="utf-8").splitlines()
        if "Paper:" in line and not form.search(line)
    ]
    assert wrong == []


COMMANDS = typer.main.get_command(app).commands  # pyright: ignore


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.item)
def test_code_tests_and_commands_that_the_index_names_exist(row: Row):
    assert row.code, "a row names its code"
    assert [name for name in row.code if not resolves(name)] == []
    assert row.tests, "a row names a test"
    for name in row.tests:
        file, _, function = name.partition("::")
        path = ROOT / "tests" / file
        assert path.exists(), name
        assert function in functions_in(path), name
    assert [command for command in row.commands if command.split()[1] not in COMMANDS] == []


def test_names_in_the_notation_exist():
    text = (ROOT / "docs/notation.md").read_text(encoding="utf-8")
    names = set(re.findall(r"`(paceline\.[\w.]+)`", text))
    assert names
    assert sorted(name for name in names if not resolves(name)) == []
