"""Prompts unlike documentation, on every machine: questions about Python, and its own source code.

A draft that was trained on documentation is measured on these, too: it may lose there what it wins
at home. What a question asks about is held out, and no source code is trained on at all.
"""

from __future__ import annotations

import ast
import textwrap
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.data.python_docs import (
    is_held_out,
    parsed_files,
    standard_library,
    write_texts,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# Long enough for a prompt of 32 tokens that is a part of the function, not all of it.
_SHORTEST_FUNCTION = 300
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class PythonTasks(NamedTuple):
    """`questions`: chats, `{"messages": [...]}`; `code`: functions, `{"text": ...}`."""

    questions: Path
    code: Path


def write_python_tasks(folder: Path) -> PythonTasks:
    """Write the files into `folder`, each whole or not at all."""
    files = PythonTasks(*(folder / f"{name}.jsonl" for name in PythonTasks._fields))
    names: list[str] = []
    code: list[str] = []
    root = standard_library()
    for path, source, tree in parsed_files(root):
        module = ".".join(path.relative_to(root).with_suffix("").parts)
        names += _names(module.removesuffix(".__init__"), tree)
        code += _functions(source, tree)
    write_texts(files.questions, dict.fromkeys(names), _question)
    write_texts(files.code, dict.fromkeys(code))
    return files


def _question(name: str) -> dict[str, Any]:
    content = f"What does Python's `{name}` do? Show it in a short example."
    return {"messages": [{"role": "user", "content": content}]}


def _names(module: str, tree: ast.Module) -> Iterator[str]:
    """What a module offers, as far as its documentation is held out."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            public = "._" not in f".{module}.{node.name}"
            if public and text and is_held_out(text.strip()):
                yield f"{module}.{node.name}"


def _functions(source: str, tree: ast.Module) -> Iterator[str]:
    """Functions of some length that are held out; without documentation, which may be trained on."""
    lines = source.split("\n")  # a form feed ends a line for splitlines, and none for Python
    for node in ast.walk(tree):
        if isinstance(node, _FUNCTIONS) and ast.get_docstring(node) is None:
            text = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno])).strip()
            if len(text) >= _SHORTEST_FUNCTION and is_held_out(text):
                yield text
