"""Builds out-of-domain prompts: questions about Python, and functions of its standard library.

They show whether a draft aligned on Python's documentation gets worse on other text. The documented
objects in the questions are held out. Other functions than those of the prompts can be trained on,
to see whether that cures the draft.
"""

from __future__ import annotations

import ast
import textwrap
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.data.python_docs import is_held_out, parsed_files, standard_library, write_texts

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_SHORTEST_FUNCTION = 300  # characters, so that a function is longer than a prompt of 32 tokens
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class PythonTasks(NamedTuple):
    """`questions`: chats, `{"messages": [...]}`; `code`: functions, `{"text": ...}`.

    `code_train`: functions that are not in `code`.
    """

    questions: Path
    code: Path
    code_train: Path


def write_python_tasks(folder: Path) -> PythonTasks:
    """Write the files into `folder`, each atomically."""
    files = PythonTasks(*(folder / f"{name}.jsonl" for name in PythonTasks._fields))
    names: list[str] = []
    code: dict[bool, list[str]] = {True: [], False: []}  # by whether it is held out
    root = standard_library()
    for path, source, tree in parsed_files(root):
        module = ".".join(path.relative_to(root).with_suffix("").parts)
        names += _names(module.removesuffix(".__init__"), tree)
        for text in _functions(source, tree):
            code[is_held_out(text)].append(text)
    write_texts(files.questions, dict.fromkeys(names), _question)
    write_texts(files.code, dict.fromkeys(code[True]))
    write_texts(files.code_train, dict.fromkeys(code[False]))
    return files


def _question(name: str) -> dict[str, Any]:
    content = f"What does Python's `{name}` do? Show it in a short example."
    return {"messages": [{"role": "user", "content": content}]}


def _names(module: str, tree: ast.Module) -> Iterator[str]:
    """Public names of a module whose docstrings are held out."""
    for node in tree.body:
        if isinstance(node, (ast.ClassDef, *_FUNCTIONS)):
            text = ast.get_docstring(node)
            public = "._" not in f".{module}.{node.name}"
            if public and text and is_held_out(text.strip()):
                yield f"{module}.{node.name}"


def _functions(source: str, tree: ast.Module) -> Iterator[str]:
    """Functions without docstrings, which may be training text."""
    lines = source.split("\n")  # splitlines would also split at form feeds, unlike Python
    for node in ast.walk(tree):
        if isinstance(node, _FUNCTIONS) and ast.get_docstring(node) is None:
            text = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno])).strip()
            if len(text) >= _SHORTEST_FUNCTION:
                yield text
