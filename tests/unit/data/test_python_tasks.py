"""Prompts unlike documentation: nothing in them that a draft of the corpus was trained on."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from paceline.data import read_records
from paceline.data.python_docs import (
    PythonTasks,
    standard_library,
    write_python_docs,
    write_python_tasks,
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> PythonTasks:
    return write_python_tasks(tmp_path_factory.mktemp("tasks"))


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_questions_are_chats_about_things_whose_documentation_is_held_out(
    files: PythonTasks, tmp_path: Path
):
    records = read_records(files.questions)
    assert len(records) >= 64
    assert {record.kind for record in records} == {"chat"}
    trained = {row["text"] for row in rows(write_python_docs(tmp_path).train)}
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


def test_code_has_no_documentation_that_may_have_been_trained_on(files: PythonTasks):
    texts = [row["text"] for row in rows(files.code)]
    assert len(texts) >= 64
    assert len(set(texts)) == len(texts)
    assert all(len(text) >= 300 for text in texts)
    assert all(text.startswith(("def ", "async def ", "@")) for text in texts)


def test_functions_to_train_on_are_others_than_those_of_the_prompts(files: PythonTasks):
    prompts, trained = ({row["text"] for row in rows(path)} for path in files[1:])
    assert len(trained) > len(prompts)
    assert not trained & prompts
