"""Reads data sets with the datasets library: those of the hub, and directories by file names.

A README.md or a script in a directory is not read: it may name files elsewhere.
"""

from __future__ import annotations

import glob
import itertools
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.data.text_files import ABOUT_DATA, arrow_row, refuse_links, shorten
from paceline.errors import PacelineError, PromptError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_READERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".tsv": "csv", ".txt": "text"}
_READERS |= {".parquet": "parquet", ".arrow": "arrow"}
_REMOTE = ("hf://", "https://")  # prefixes of files that a hub data set may name


def read_data_set(
    path: str, subset: str | None, split: str, *, streaming: bool
) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Rows of a data set of the hub or of a directory, with their locations.

    Raises:
        PromptError: it is missing or damaged, or names files of this machine.
    """
    try:
        builder = _builder(path, subset)
        if streaming:
            rows = iter(builder.as_streaming_dataset(split))
        else:
            builder.download_and_prepare()
            rows = iter(builder.as_dataset(split))
        for number in itertools.count():
            row = next(rows, None)
            if row is None:
                return
            assert isinstance(row, dict)
            yield arrow_row(row), f"{path} row {number}"
    except PacelineError:
        raise  # also raised by the consumer of this generator
    except Exception as error:
        # The exception types for a missing or damaged data set depend on the library's version.
        reason = shorten(" ".join(str(error.__cause__ or error).split()), 160)
        raise PromptError(
            f"cannot load {path} (subset {subset}, split {split}) as a file, directory or hub data "
            f"set: {reason}"
        ) from None


def _builder(path: str, subset: str | None) -> Any:
    import datasets  # slow to import, and not needed for files

    folder = Path(path) / (subset or "")
    if folder.is_dir():
        kind, files = _files(folder, Path(path))
        options: Any = {"sep": "\t"} if kind == ".tsv" else {}
        return datasets.load_dataset_builder(_READERS[kind], data_files=files, **options)
    if Path(path).is_dir():
        raise PromptError(
            f"{path} has no directory {subset}, and its README.md is not read; unset subset, and "
            "set path to the files or their directory"
        )
    builder: Any = datasets.load_dataset_builder(path, subset)
    for name in itertools.chain.from_iterable((builder.config.data_files or {}).values()):
        if not str(name).startswith(_REMOTE) or "::" in str(name):  # :: chains to a local file
            raise PromptError(f"the data set {path} names {name}, a file of this machine; set path")
    return builder


def _files(folder: Path, inside: Path) -> tuple[str, dict[str, list[str]]]:
    """The most frequent kind of data file in a folder, and its files by split.

    Raises:
        PromptError: there is none, or one is a link out of `inside`.
    """
    from datasets.data_files import DataFilesDict, get_data_patterns

    base = str(folder.resolve())
    found = DataFilesDict.from_patterns(get_data_patterns(base), base_path=base)
    kinds = Counter(_kind(name) for names in found.values() for name in names)
    del kinds[""]
    if not kinds:
        raise PromptError(f"{folder} holds no text; wanted .jsonl, .parquet, .txt or .csv files")
    kind = kinds.most_common(1)[0][0]
    refuse_links([Path(name) for names in found.values() for name in names], inside)
    return kind, {
        str(split): [glob.escape(str(name)) for name in names if _kind(name) == kind]
        for split, names in found.items()
    }


def _kind(name: str) -> str:
    """The suffix that tells how to read a file, before that of a compression; empty if unknown."""
    path = Path(name.lower())
    known = (suffix for suffix in reversed(path.suffixes) if suffix in _READERS)
    return "" if path.name in ABOUT_DATA else next(known, "")
