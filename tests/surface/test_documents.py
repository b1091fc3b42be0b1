"""What a document tells a reader to type or to import is there."""

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main
import yaml

from paceline.cli.main import app
from paceline.config import validate
from paceline.train import AlignConfig

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))


def fences(document: Path) -> Iterator[tuple[str, str]]:
    """Language and content of each fenced block."""
    text = document.read_text(encoding="utf-8")
    yield from re.findall(r"^```(\w*)\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def commands_in(document: Path) -> Iterator[str]:
    """Lines of shell blocks and inline code; a line that ends in a backslash goes on."""
    for language, content in fences(document):
        if language in {"", "sh", "bash", "console"}:
            yield from content.replace("\\\n", " ").splitlines()
    yield from re.findall(r"`([^`\n]+)`", document.read_text(encoding="utf-8"))


def test_make_offers_the_two_commands_and_the_others():
    assert {"test", "demo", "lint", "format", "clean", "help"} <= targets()


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_make_targets_that_a_document_names_exist(document: Path):
    named = {
        word
        for line in commands_in(document)
        for words in re.findall(r"^\s*(?:\$ )?make ((?:[a-z-]+ ?)+)", line)
        for word in words.split()
    }
    assert named <= targets()


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_commands_and_options_that_a_document_names_exist(document: Path):
    commands = typer.main.get_command(app).commands  # pyright: ignore
    for line in commands_in(document):
        called = re.match(r"^\s*(?:\$ )?(?:\.venv/bin/)?paceline ([a-z-]+)(.*)", line)
        if called is None:
            continue
        verb, rest = called.groups()
        assert verb in commands, line
        known = {option for parameter in commands[verb].params for option in parameter.opts}
        given = set(re.findall(r"(?<!\S)--[a-z][a-z-]*", rest.partition(" #")[0]))
        assert given <= known | {"--help"}, line


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_python_in_a_document_parses_and_its_imports_resolve(document: Path):
    for language, content in fences(document):
        if language != "python":
            continue
        for node in ast.walk(ast.parse(content)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("paceline"):
                module = importlib.import_module(node.module or "")
                assert [a.name for a in node.names if not hasattr(module, a.name)] == []


def test_python_in_a_document_uses_no_name_that_it_does_not_define(tmp_path: Path):
    """One start of ruff for all documents, whose names it prints."""
    for document in DOCUMENTS:
        blocks = [content for language, content in fences(document) if language == "python"]
        (tmp_path / f"{name_of(document).replace('/', '.')}.py").write_text("\n".join(blocks))
    check = [sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache", "--select", "F821"]
    found = subprocess.run([*check, str(tmp_path)], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_configurations_in_a_document_fit_their_schema(document: Path):
    for language, content in fences(document):
        if language == "yaml" and "output:" in content:
            validate(AlignConfig, yaml.safe_load(content))


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_files_that_a_document_links_to_exist(document: Path):
    links = re.findall(r"\]\(([^)#:]+)\)", document.read_text(encoding="utf-8"))
    assert [link for link in links if not (document.parent / link).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_what_belongs_to_an_item_of_a_list_is_indented_by_four(document: Path):
    """Python-Markdown, which makes the site, ends the list at 1 to 3 spaces; GitHub does not."""
    text = re.sub(r"^( *)```.*?^\1```", "", document.read_text("utf-8"), flags=re.M | re.S)
    assert re.findall(r"^ {1,3}(?:[-*]|\d+\.) .*", text, flags=re.M) == []
    assert re.findall(r"(?<=\n\n) {1,3}\S.*", text) == []
