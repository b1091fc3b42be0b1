"""Python's own documentation as a corpus: the language reference's topics and all docstrings.

It is on every machine that runs Paceline, so the demo and the benchmarks need no download. Documents
are split once, by a hash of their text: one that is held out is never trained on, on any machine.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import json
import re
import sysconfig
import warnings
from pathlib import Path
from pydoc_data import topics  # the text behind help("topic")
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.errors import UsageError
from paceline.records import atomic_write_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_SKIPPED = {"site-packages", "test", "tests", "idle_test", "__pycache__", "lib2to3"}
_SHORTEST_DOCUMENT = 40
# Long enough for a prompt of 32 tokens that is a part of the document, not all of it.
_SHORTEST_PROMPT = 300
# About 100 tokens, so that a beginning is one row of training, not several.
_BEGINNING = 400
_HELD_OUT_SHARE = 0.08
_HALF_A_CHARACTER = re.compile("[\ud800-\udfff]")  # cannot be written to a file


class PythonDocs(NamedTuple):
    """Files of one document a line, `{"text": ...}`.

    `prompts` is the held-out ones of some length, `beginnings` how training ones of that length
    begin: what a target is to continue in training should look like what it will be given later.
    """

    train: Path
    held_out: Path
    prompts: Path
    beginnings: Path


def write_python_docs(folder: Path) -> PythonDocs:
    """Write the files into `folder`, each whole or not at all."""
    files = PythonDocs(*(folder / f"{name}.jsonl" for name in PythonDocs._fields))
    train: list[str] = []
    held_out: list[str] = []
    for document in python_documents():
        (held_out if is_held_out(document) else train).append(document)
    prompts = [document for document in held_out if len(document) >= _SHORTEST_PROMPT]
    beginnings = [text[:_BEGINNING] for text in train if len(text) >= _SHORTEST_PROMPT]
    for path, documents in zip(files, (train, held_out, prompts, beginnings), strict=True):
        write_texts(path, documents)
    return files


def write_package_docs(path: Path, packages: Iterable[str]) -> None:
    """Python's training documents, and the docstrings of installed packages: more text of that kind.

    What Python holds out is held out here, too.

    Raises:
        UsageError: a package is not installed.
    """
    places = [place for name in packages for place in package_places(name)]
    texts = [*python_documents()]
    texts += _long_enough(text for place in places for text in read_docstrings(place))
    write_texts(path, (text for text in dict.fromkeys(texts) if not is_held_out(text)))


def package_places(name: str) -> list[Path]:
    """The folders of an installed package, or the file of a module.

    Raises:
        UsageError: the package is not installed.
    """
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    places = [] if spec is None else [*(spec.submodule_search_locations or [spec.origin])]
    found = [Path(str(place)) for place in places if place and Path(str(place)).exists()]
    if not found:
        raise UsageError(f"no package {name} is installed; name one that can be imported")
    return found


def _document(text: str) -> dict[str, Any]:
    return {"text": text}


def write_texts(
    path: Path, texts: Iterable[str], row: Callable[[str], dict[str, Any]] = _document
) -> None:
    """A row a line, in the order of the texts' hashes: neighbours in the library are none here."""
    rows = (row(text) for text in sorted(texts, key=_digest))
    atomic_write_text(path, "".join(json.dumps(row) + "\n" for row in rows))


def python_documents() -> tuple[str, ...]:
    """Every topic and docstring of some length, once each; read once per process."""
    return _documents(standard_library())


@functools.cache
def _documents(root: Path) -> tuple[str, ...]:
    found = dict.fromkeys(topics.topics.values())
    found.update(dict.fromkeys(read_docstrings(root)))
    return tuple(dict.fromkeys(_long_enough(found)))


def _long_enough(texts: Iterable[str]) -> Iterator[str]:
    documents = (text.strip() for text in texts)
    return (text for text in documents if len(text) >= _SHORTEST_DOCUMENT)


def standard_library() -> Path:
    """Where Python keeps its own modules."""
    return Path(sysconfig.get_paths()["stdlib"])


def read_docstrings(root: Path) -> Iterator[str]:
    """The docstrings of a module's file or of all files below a folder, tests left out.

    Cost: seconds for the standard library, all of which is parsed.
    """
    for _, _, tree in parsed_files(root):
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text and not _HALF_A_CHARACTER.search(text):
                    yield text


def parsed_files(root: Path) -> Iterator[tuple[Path, str, ast.Module]]:
    """A file or all files below a folder with source and syntax tree, tests and broken ones left out."""
    for path in [root] if root.is_file() else sorted(root.rglob("*.py")):
        if _SKIPPED.intersection(path.relative_to(root).parts):
            continue
        try:
            source = path.read_text(encoding="utf-8")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # old code has escapes that Python now warns of
                tree = ast.parse(source)
        except (OSError, SyntaxError, ValueError, RecursionError):
            continue
        yield path, source, tree


def _digest(document: str) -> str:
    return hashlib.sha256(document.encode()).hexdigest()


def is_held_out(document: str) -> bool:
    """Whether a document, without white space around it, is kept out of all training."""
    return int(_digest(document)[:8], 16) / 2**32 < _HELD_OUT_SHARE
