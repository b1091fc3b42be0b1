"""Python's own documentation as a corpus, and prompts of other domains."""

import ast
import json
from pathlib import Path

import pytest

from paceline.data import read_records
from paceline.data.python_docs import (
    PythonDocs,
    is_held_out,
    read_docstrings,
    standard_library,
    write_python_docs,
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> PythonDocs:
    return write_python_docs(tmp_path_factory.mktemp("docs"))


def _texts(path: Path) -> list[str]:
    return [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]


def test_training_documents_and_their_beginnings_are_not_held_out(files: PythonDocs):
    train, held_out = set(_texts(files.train)), set(_texts(files.held_out))
    assert sum(map(len, train)) > 1_000_000, "enough for the demo"
    assert not train & held_out
    assert set(_texts(files.prompts)) < held_out
    assert len(_texts(files.prompts)) >= 64
    beginnings = _texts(files.beginnings)
    assert sorted(beginnings) == sorted(text[:400] for text in train if len(text) >= 300)


def test_writing_twice_gives_the_same_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    part = standard_library() / "asyncio"
    monkeypatch.setattr("paceline.data.python_docs.standard_library", lambda: part)
    written = [write_python_docs(tmp_path / name) for name in ("one", "two")]
    one, two = ([path.read_bytes() for path in files] for files in written)
    assert one == two
    assert all(one)


def test_questions_are_chats_about_things_whose_documentation_is_held_out(files: PythonDocs):
    records = read_records(files.questions)
    assert len(records) >= 64
    assert {record.kind for record in records} == {"chat"}
    trained = set(_texts(files.train))
    for record in records[:20]:
        name = record.messages[0]["content"].split("`")[1]
        module, _, attribute = name.rpartition(".")
        assert _docstring(module, attribute) not in trained


def _docstring(module: str, attribute: str) -> str | None:
    """Read from the source: importing some of these modules opens windows."""
    path = standard_library().joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    nodes = ast.parse(path.read_text(encoding="utf-8")).body
    (text, *_) = [
        ast.get_docstring(node)
        for node in nodes
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name == attribute
    ]
    return text and text.strip()


def test_code_has_no_documentation_that_may_have_been_trained_on(files: PythonDocs):
    texts = _texts(files.code)
    assert len(texts) >= 64
    assert len(set(texts)) == len(texts)
    assert all(len(text) >= 300 for text in texts)
    assert all(text.startswith(("def ", "async def ", "@")) for text in texts)
    assert all(map(is_held_out, texts))


def test_docstrings_of_tests_and_those_with_half_a_character_are_left_out(tmp_path: Path):
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "two.py").write_text('"""Of a test."""')
    (tmp_path / "one.py").write_text('"""Of a module."""\n\ndef f():\n    "\\ud800"\n')
    assert list(read_docstrings(tmp_path)) == ["Of a module."]
