"""Files that come with Paceline, and copies of files of models."""

from __future__ import annotations

import difflib
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import AfterValidator

if TYPE_CHECKING:
    from collections.abc import Iterable

SHIPPED = Path(__file__).parent / "shipped"
"""Files of the repository at their paths in it: links in the sources, and files in a wheel."""
TEMPLATES = "additional_chat_templates"
"""The directory beside a tokenizer with chat templates other than its first."""


def _one_part(name: str) -> str:
    if "/" in name or name.startswith(".") or not name.isprintable() or not name.strip():
        raise ValueError("is not the name of a file; leave out /, a dot at its start, and controls")
    return name


PathPart = Annotated[str, AfterValidator(_one_part)]
"""A name in a configuration that becomes the name of a file or directory."""


def shipped(path: Path) -> Path:
    """The path; if there is nothing here, the file at this path that comes with Paceline.

    These are `configs/`, so that commands of the guides need no clone.
    """
    own = SHIPPED / path
    return own if not path.exists() and own.exists() else path


def copy_files(files: Iterable[Path], out: Path) -> None:
    """Copy files into a directory, and of directories only `TEMPLATES`."""
    for path in files:
        if path.is_file():
            shutil.copyfile(path, out / path.name)
        elif path.name == TEMPLATES:
            (out / path.name).mkdir(exist_ok=True)
            copy_files(path.iterdir(), out / path.name)


def neighbour(path: Path) -> str:
    """Of a path at which nothing is, ` (did you mean OTHER?)`; empty if there is none like it."""
    names = os.listdir(path.parent) if path.parent.is_dir() else []  # noqa: PTH208 - names alone
    close = difflib.get_close_matches(path.name, names, n=1, cutoff=0.8)
    return f" (did you mean {path.parent / close[0]}?)" if close else ""
