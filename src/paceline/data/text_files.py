"""Finds and reads files of text: a file, the files below a directory, or those of a pattern."""

from __future__ import annotations

import glob
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import PromptError

if TYPE_CHECKING:
    from collections.abc import Iterator


def is_pattern(path: Path) -> bool:
    """True if the path has wildcards and is not itself a file or directory."""
    return glob.has_magic(str(path)) and not path.exists()


def matches(path: Path) -> list[Path]:
    """Files and directories that match a pattern such as `runs/*/data`, sorted."""
    if not is_pattern(path):
        return []
    return sorted(Path(path.anchor).glob(str(path.relative_to(path.anchor))))


def data_files(folder: Path) -> list[Path]:
    """Data files below a folder, sorted, without hidden ones; or the file itself."""
    if folder.is_file():
        return [folder]
    if found := matches(folder):
        return [file for match in found for file in data_files(match)]
    return sorted(
        path
        for path in folder.rglob("*")
        if path.suffix.lower() in (".txt", ".jsonl", ".parquet")
        and path.is_file()
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )


def file_suffixes(folder: Path) -> set[str]:
    """The suffix of the data files below a folder, lower case; raises PromptError for several."""
    suffixes = {path.suffix.lower() for path in data_files(folder)}
    if len(suffixes) > 1:  # the datasets library would silently read files of one kind only
        raise PromptError(
            f"{folder} holds files of several kinds, {', '.join(sorted(suffixes))}; give each kind "
            "its own directory"
        )
    return suffixes


def read_lines(path: Path) -> Iterator[tuple[str, str]]:
    """Lines that are not blank, with their locations; raises PromptError if they are not UTF-8."""
    if not path.exists():
        raise PromptError(f"no file at {path}; check the path")
    try:
        with path.open("rb") as stream:
            for number, raw in enumerate(stream, start=1):
                where = f"{path} line {number}"
                try:
                    # Only the first line can have a byte order mark.
                    line = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                except UnicodeDecodeError:
                    raise PromptError(f"{where} is not UTF-8; convert the file to UTF-8") from None
                if line:
                    yield line, where
    except OSError as error:
        raise PromptError(f"cannot read {path}: {error.strerror}; name a text file") from None
