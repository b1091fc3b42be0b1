"""Finds and reads files of text: those of a directory or pattern, and of the datasets library."""

from __future__ import annotations

import contextlib
import glob
import itertools
import json
import re
import warnings
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import PacelineError, PromptError, shorten
from paceline.records import read_lines

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


WANTED = "wanted one of prompt, text, messages, conversations, tokens"

_SUFFIXES = (".txt", ".jsonl", ".parquet")
_UNREAD = (".json", ".csv", ".tsv", ".arrow", ".gz", ".bz2", ".xz", ".zst", ".zip")
_CHATS = frozenset(
    {"messages", "conversations", "prompt", "completion", "tools", "chat_template_kwargs"}
)
ABOUT_DATA = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")


def is_pattern(path: Path) -> bool:
    """True if the path has wildcards and is not itself a file or directory."""
    return glob.has_magic(str(path)) and not path.exists()


def matches(path: Path) -> list[Path]:
    """Files and directories that match a pattern such as `runs/*/data`, sorted."""
    if not is_pattern(path):
        return []
    folder = Path(*itertools.takewhile(lambda part: not glob.has_magic(part), path.parts))
    return sorted(folder.glob(str(path.relative_to(folder))))


def data_files(folder: Path) -> list[Path]:
    """Data files below a folder, sorted, without hidden ones; or the file itself."""
    if folder.is_file():
        return [folder]
    if found := matches(folder):
        return [file for match in found for file in data_files(match)]
    return [one for one in _in_sight(folder) if kind_of(one) in _SUFFIXES]


def kind_of(path: Path) -> str:
    """The suffix of a file in lower case, without `.gz`."""
    return Path(path.name.lower().removesuffix(".gz")).suffix


def _in_sight(folder: Path) -> list[Path]:
    """Files below a folder, sorted, without hidden ones."""
    return sorted(
        path
        for path in folder.rglob("*")
        if path.is_file()
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )


def folder_files(folder: Path) -> list[Path]:
    """The data files below a folder, all of one kind; warns once of data in other kinds of files.

    Raises:
        PromptError: the files are of several kinds.
    """
    files = data_files(folder)
    suffixes = set(map(kind_of, files))
    if len(suffixes) > 1:
        raise PromptError(
            f"{folder} holds files of several kinds, {', '.join(sorted(suffixes))}; give each kind "
            "its own directory"
        )
    unread = [
        path.name
        for path in (_in_sight(folder) if files else ())
        if path not in files and path.suffix.lower() in _UNREAD and path.name not in ABOUT_DATA
    ]
    if unread:
        warnings.warn(
            f"{folder}: {len(unread)} files beside the {len(files)} {suffixes.pop()} files are not "
            f"read, such as {unread[0]}; convert them to use them",
            stacklevel=2,
        )
    return files


def warn_of_splits(folder: Path, files: list[Path]) -> None:
    """Warn once if files for training and for testing are read together, by their names."""
    names = [str(path.relative_to(folder)) for path in files]
    words = {name: set(re.findall("[a-z]+", name.lower())) for name in names}
    kept = next((name for name, found in words.items() if found & _TEST), None)
    if kept is not None and any("train" in found for found in words.values()):
        warnings.warn(
            f"{folder}: all {len(files)} files are read, also {kept}; set split=train, or name one "
            "file, to keep texts for testing apart",
            stacklevel=2,
        )


def read_file(path: Path) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Rows of a file with their locations. A line of a `.txt` file has one column, `text`.

    Raises:
        PromptError: the file cannot be read; the message names the line.
    """
    match kind_of(path):
        case ".txt":
            return (({"text": line}, where) for line, where in read_lines(path))
        case ".jsonl":
            return read_json_lines(path)
        case ".parquet":
            return read_parquet(path)
    if path.is_file():
        raise PromptError(f"{path} is an unknown kind of file; wanted .txt, .jsonl or .parquet")
    raise PromptError(f"no file or directory at {path}; check the path")


def read_json_lines(path: Path) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Objects of a `.jsonl` file."""
    for line, where in read_lines(path):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):  # ValueError: also numbers of too many digits
            reason = f"{where} is not JSON: {shorten(line)}"
            raise PromptError(f"{reason}; write one JSON object per line") from None
        if not isinstance(row, dict):
            raise PromptError(f"{where} is not a JSON object: {shorten(line)}; {WANTED} as a key")
        yield row, where


def read_parquet(path: Path) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Rows of a `.parquet` file."""
    from pyarrow import parquet  # slow to import, and not needed for other files

    number = itertools.count()
    try:
        with parquet.ParquetFile(path) as file:
            names = Counter(file.schema_arrow.names)
            if twice := [name for name, count in names.items() if count > 1]:
                raise PromptError(
                    f"{path} has {names[twice[0]]} columns named {twice[0]}; rename all but one"
                )
            for batch in file.iter_batches(batch_size=64):
                for row in batch.to_pylist():
                    yield arrow_row(row), f"{path} row {next(number)}"
    except PacelineError:
        raise  # also raised by the consumer of this generator
    except Exception as error:  # of the arrow library, which has its own types
        reason = shorten(" ".join(str(error).split()), 160)
        raise PromptError(f"cannot load {path} as a parquet file: {reason}") from None


def arrow_row(row: dict[str, Any]) -> dict[str, Any]:
    """A row whose chats have only the keys that they were written with.

    Arrow gives all objects of a column the keys of each, with None as the value.
    """
    return row | {name: _without_nulls(row[name]) for name in row.keys() & _CHATS}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return value


_TEST = frozenset({"test", "tests", "val", "valid", "validation", "dev", "eval"})
_READERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".tsv": "csv", ".txt": "text"}
_READERS |= {".parquet": "parquet", ".arrow": "arrow"}


def read_data_set(
    path: str, subset: str | None, split: str, *, streaming: bool
) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Rows of a data set of the hub or of a directory, with their locations.

    A README.md or a script in a directory is not read: it may name files elsewhere.

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
        kind, files = _files(folder)
        options: Any = {"sep": "\t"} if kind == ".tsv" else {}
        return datasets.load_dataset_builder(_READERS[kind], data_files=files, **options)
    if Path(path).is_dir():
        raise PromptError(
            f"{path} has no directory {subset}, and its README.md is not read; unset subset, and "
            "set path to the files or their directory"
        )
    with _of_the_hub_alone(path):
        builder: Any = datasets.load_dataset_builder(path, subset)
    for name in itertools.chain.from_iterable((builder.config.data_files or {}).values()):
        _refuse_others(path, str(name), "hf://")
    return builder


def _refuse_others(path: str, name: str, start: str) -> None:
    """Refuse a file of another file system: `::` chains them, and some run code of their names."""
    if not name.startswith(start) or "::" in name:
        raise PromptError(
            f"the data set {path} names {shorten(name, 160)}, and only {start} without :: is read; "
            "copy the file, and set path to it"
        )


@contextlib.contextmanager
def _of_the_hub_alone(path: str) -> Iterator[None]:
    """Refuse what a data set names before the datasets library makes a file system for it."""
    from datasets import data_files

    make = data_files.url_to_fs

    def checked(name: str, **options: Any) -> Any:
        _refuse_others(path, name, "hf://")
        return make(name, **options)

    data_files.url_to_fs = checked
    try:
        yield
    finally:
        data_files.url_to_fs = make


def _files(folder: Path) -> tuple[str, dict[str, list[str]]]:
    """The most frequent kind of data file in a folder, and its files by split.

    Raises:
        PromptError: there is none, or a name has `::`.
    """
    from datasets.data_files import DataFilesDict, get_data_patterns

    base = str(folder.resolve())
    for name in (base, *map(str, _in_sight(Path(base)))):
        _refuse_others(str(folder), name, "/")
    found = DataFilesDict.from_patterns(get_data_patterns(base), base_path=base)
    kinds = Counter(_kind(name) for names in found.values() for name in names)
    del kinds[""]
    if not kinds:
        raise PromptError(f"{folder} holds no text; wanted .jsonl, .parquet, .txt or .csv files")
    kind = kinds.most_common(1)[0][0]
    return kind, {
        str(split): [glob.escape(str(name)) for name in names if _kind(name) == kind]
        for split, names in found.items()
    }


def _kind(name: str) -> str:
    """The suffix that tells how to read a file, before that of a compression; empty if unknown."""
    path = Path(name.lower())
    known = (suffix for suffix in reversed(path.suffixes) if suffix in _READERS)
    return "" if path.name in ABOUT_DATA else next(known, "")
