"""Builds a corpus from Python's documentation: help topics and standard-library docstrings.

Every Python installation has it, so the demo and the benchmarks need no download. A hash of the
text decides whether a document is held out, so the split is the same on all machines.

Prompts of another domain are questions about Python, whose documented objects are held out, and
functions of its standard library. They show whether a draft that is aligned on the documentation
gets worse on other text.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib.util
import json
import sysconfig
import textwrap
import warnings
from pathlib import Path
from pydoc_data import topics  # the text behind help("topic")
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.errors import UsageError
from paceline.models.chat_text import HALF_PAIR
from paceline.records import atomic_write_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


_SKIPPED = {"site-packages", "test", "tests", "idle_test", "__pycache__", "lib2to3"}
_SHORTEST_DOCUMENT = 40
_SHORTEST_PROMPT = 300  # characters, so that a text is longer than a prompt of 32 tokens
_BEGINNING = 400  # characters, about 100 tokens: one training row
_HELD_OUT_SHARE = 0.08
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class PythonDocs(NamedTuple):
    """Files with one row per line, `{"text": ...}`, or `{"messages": [...]}` in `questions`.

    `prompts` has the longer held-out documents, `beginnings` the first characters of the longer
    training documents, as prompts for on-policy training. `questions` are chats about objects whose
    docstrings are held out, `code` functions without docstrings. `pretraining` has the training
    documents and docstrings of packages, without held-out ones.
    """

    train: Path
    held_out: Path
    prompts: Path
    beginnings: Path
    questions: Path
    code: Path
    pretraining: Path


def write_python_docs(folder: Path, packages: Iterable[str] = ()) -> PythonDocs:
    """Write the files into `folder`, each atomically.

    Cost: parses the standard library, which takes seconds.

    Raises:
        UsageError: a package is not installed, or has no Python source.
    """
    places = [place for name in packages for place in _package_places(name)]
    docstrings, names, code = _read(standard_library())
    documents = list(dict.fromkeys(_long_enough([*topics.topics.values(), *docstrings])))
    train = [document for document in documents if not is_held_out(document)]
    held_out = [document for document in documents if is_held_out(document)]
    prompts = [document for document in held_out if len(document) >= _SHORTEST_PROMPT]
    beginnings = [text[:_BEGINNING] for text in train if len(text) >= _SHORTEST_PROMPT]
    others = _long_enough(text for place in places for text in read_docstrings(place))
    pretraining = dict.fromkeys([*train, *(text for text in others if not is_held_out(text))])
    texts = train, held_out, prompts, beginnings, names, code, pretraining
    files = PythonDocs(*(folder / f"{name}.jsonl" for name in PythonDocs._fields))
    for path, of_path in zip(files, texts, strict=True):
        row = _question if of_path is names else _document
        ordered = sorted(of_path, key=_digest)  # so that related texts are not adjacent
        atomic_write_text(path, "".join(json.dumps(row(text)) + "\n" for text in ordered))
    return files


def _package_places(name: str) -> list[Path]:
    """Folders of an installed package, or the file of a module; nothing is imported.

    Raises:
        UsageError: the package is not installed, or has no Python source.
    """
    spec = None
    with contextlib.suppress(ImportError, ValueError):  # of modules without a spec, as __main__
        spec = importlib.util.find_spec(name)
    if spec is None:
        raise UsageError(f"package {name} is not installed; install it or leave it out")
    paths = map(Path, spec.submodule_search_locations or [str(spec.origin)])
    found = [path for path in paths if path.is_dir() or path.suffix == ".py"]
    if not found:
        raise UsageError(f"{name} has no Python source to take docstrings from; leave it out")
    return found


def _document(text: str) -> dict[str, Any]:
    return {"text": text}


def _question(name: str) -> dict[str, Any]:
    content = f"What does Python's `{name}` do? Show it in a short example."
    return {"messages": [{"role": "user", "content": content}]}


def _long_enough(texts: Iterable[str]) -> Iterator[str]:
    documents = (text.strip() for text in texts)
    return (text for text in documents if len(text) >= _SHORTEST_DOCUMENT)


def standard_library() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def read_docstrings(root: Path) -> Iterator[str]:
    """Yield the docstrings of a file, or of all files below a folder except tests.

    Cost: parses every file; seconds for the standard library.
    """
    for _, _, tree in _parsed_files(root):
        yield from _docstrings(tree)


def _docstrings(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, *_FUNCTIONS)):
            text = ast.get_docstring(node)
            if text and not HALF_PAIR.search(text):
                yield text


def _parsed_files(root: Path) -> Iterator[tuple[Path, str, ast.Module]]:
    """Yield path, source and syntax tree of a file or folder, without tests and invalid files."""
    for path in [root] if root.is_file() else sorted(root.rglob("*.py")):
        if _SKIPPED.intersection(path.relative_to(root).parts):
            continue
        try:
            source = path.read_text(encoding="utf-8")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about invalid escape sequences
                tree = ast.parse(source)
        except (OSError, SyntaxError, ValueError, RecursionError):
            continue
        yield path, source, tree


def _digest(document: str) -> str:
    return hashlib.sha256(document.encode()).hexdigest()


def is_held_out(document: str, share: float = _HELD_OUT_SHARE) -> bool:
    """True if a document, stripped of surrounding white space, is excluded from training.

    `share`: of all documents; a hash decides.
    """
    return int(_digest(document)[:8], 16) / 2**32 < share


def _read(root: Path) -> tuple[list[str], Iterable[str], Iterable[str]]:
    """Docstrings, names of objects whose docstrings are held out, functions that are held out."""
    docstrings, names, functions = list[str](), dict[str, None](), dict[str, None]()
    for path, source, tree in _parsed_files(root):
        docstrings += _docstrings(tree)
        module = ".".join(path.relative_to(root).with_suffix("").parts)
        names |= dict.fromkeys(_names(module.removesuffix(".__init__"), tree))
        functions |= dict.fromkeys(filter(is_held_out, _functions(source, tree)))
    return docstrings, names, functions


def _names(module: str, tree: ast.Module) -> Iterator[str]:
    """Public names of a module whose docstrings are held out."""
    for node in tree.body:
        if isinstance(node, (ast.ClassDef, *_FUNCTIONS)):
            text = ast.get_docstring(node)
            public = "._" not in f".{module}.{node.name}"
            if public and text and is_held_out(text.strip()):
                yield f"{module}.{node.name}"


def _functions(source: str, tree: ast.Module) -> Iterator[str]:
    """Functions without docstrings."""
    lines = source.split("\n")  # splitlines would also split at form feeds, unlike Python
    for node in ast.walk(tree):
        if isinstance(node, _FUNCTIONS) and ast.get_docstring(node) is None:
            text = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno])).strip()
            if len(text) >= _SHORTEST_PROMPT:
                yield text
