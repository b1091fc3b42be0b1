"""Finds and reads files of text: those of a directory or pattern, and of the datasets library."""

from __future__ import annotations

import glob
import itertools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import PacelineError, PromptError, shorten
from paceline.records import read_lines

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


WANTED = "wanted one of prompt, text, messages, conversations, tokens"

SUFFIXES = (".txt", ".jsonl", ".parquet")
_CHATS = frozenset(
    {"messages", "conversations", "prompt", "completion", "tools", "chat_template_kwargs"}
)


def data_files(path: Path) -> list[Path]:
    """The file itself, or the data files below a folder or of a pattern such as `runs/*/data`.

    They are sorted and without hidden ones; none if nothing is there.
    """
    if path.exists() or not glob.has_magic(str(path)):
        return [path] if path.is_file() else _below(path)
    folder = Path(*itertools.takewhile(lambda part: not glob.has_magic(part), path.parts))
    found = sorted(folder.glob(str(path.relative_to(folder))))
    if not found:
        raise PromptError(f"no file or directory matches {path}; check the pattern")
    return [file for match in found for file in data_files(match)]


def _below(folder: Path) -> list[Path]:
    return sorted(
        path
        for path in folder.rglob("*")
        if path.is_file()
        and kind_of(path) in SUFFIXES
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )


def kind_of(path: Path) -> str:
    """The suffix of a file in lower case, without `.gz`."""
    return Path(path.name.lower().removesuffix(".gz")).suffix


def one_kind(files: list[Path], path: Path) -> list[Path]:
    """The files of a directory or pattern; raises PromptError if they are of several kinds."""
    suffixes = set(map(kind_of, files))
    if len(suffixes) > 1:
        raise PromptError(
            f"{path} holds files of several kinds, {', '.join(sorted(suffixes))}; give each kind "
            "its own directory"
        )
    return files


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
    raise PromptError(f"{path} is an unknown kind of file; wanted .txt, .jsonl or .parquet")


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


def read_data_set(
    path: str, subset: str | None, split: str, *, streaming: bool
) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Rows of a data set of the hub or of a directory, with their locations.

    `subset`: a configuration of the data set, or a directory in the directory.

    Raises:
        PromptError: it is missing or damaged, or one of the hub names a file elsewhere.
    """
    import datasets  # slow to import, and not needed for files

    if subset is not None and (Path(path) / subset).is_dir():
        path, subset = str(Path(path) / subset), None
    try:
        builder: Any = datasets.load_dataset_builder(path, subset)
        for name in itertools.chain.from_iterable((builder.config.data_files or {}).values()):
            if not (str(name).startswith("hf://") or Path(path).is_dir()):
                raise PromptError(
                    f"the data set {path} names {shorten(str(name), 160)}, and only files of the "
                    "hub are read; copy the file, and set path to it"
                )
        if streaming:
            rows = iter(builder.as_streaming_dataset(split))
        else:
            builder.download_and_prepare()
            rows = iter(builder.as_dataset(split))
        for number, row in enumerate(rows):
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
