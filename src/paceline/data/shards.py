"""Stores distillation data as Parquet files, written atomically."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pyarrow
from pyarrow import parquet
from pydantic import BaseModel, ConfigDict

from paceline.records import append_jsonl, read_jsonl, storage_errors

if TYPE_CHECKING:
    from collections.abc import Iterable


class Answer(BaseModel):
    """One record: a prompt, the target's completion and the settings that produced it.

    Attributes:
        id: `PROMPT/N` for answer N to a prompt.
        prompt: The prompt as text, chat template included.
        completion: The completion as text, without the end-of-text token.
        prompt_tokens: The target's exact input tokens.
        completion_tokens: The generated tokens, including any end-of-text token.
        stop_reason: `eos`, or `length` or `context` if the text was truncated.
        source: Location of the prompt in its corpus.
        target_fingerprint: Hash of the target's files.
        draft, draft_fingerprint: Empty without a draft.
        dtype, activations: Precision of the target's weights and activations; empty if a server
            answered.
        server: Name and version of the server that answered, such as `vllm 0.32.0`; empty if it
            gives none, or if the target answered here.
        top_tokens, top_log_probs: The most likely tokens of each position and their log
            probabilities before sampling settings, most likely first, in nats; empty at a position
            for which the server gives none; None if they were not recorded.
        hidden_states: The target's hidden states before each token, bfloat16 bytes, one row per
            token; None if they were not recorded.
    """

    model_config = ConfigDict(extra="forbid")

    id: str
    prompt: str
    completion: str
    prompt_tokens: list[int]
    completion_tokens: list[int]
    stop_reason: Literal["eos", "length", "context"]
    temperature: float
    top_p: float
    top_k: int
    seed: int
    system_prompt: str
    source: str
    prompt_was_cut: bool
    target: str
    target_fingerprint: str
    draft: str
    draft_fingerprint: str
    num_speculative_tokens: int
    dtype: str
    activations: str
    max_new_tokens: int
    paceline: str
    server: str = ""
    top_tokens: Sequence[Sequence[int]] | None = None
    top_log_probs: Sequence[Sequence[float]] | None = None
    hidden_states: bytes | None = None


_COLUMNS = list(Answer.model_fields)
_TYPES = {
    "top_tokens": pyarrow.list_(pyarrow.list_(pyarrow.int32())),
    "top_log_probs": pyarrow.list_(pyarrow.list_(pyarrow.float32())),
    "hidden_states": pyarrow.binary(),
}


class Journal:
    """Answers of a file that is not complete yet, one JSON line each, in any order."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> dict[str, Answer]:
        """The answers by id."""
        answers = (Answer(**row) for row in read_jsonl(self._path))
        return {answer.id: answer for answer in answers}

    def append(self, answer: Answer) -> None:
        """Add an answer; raises StorageError if it cannot be written."""
        append_jsonl(self._path, answer.model_dump())

    def remove(self) -> None:
        """Remove it, because the file is complete."""
        self._path.unlink(missing_ok=True)


class ShardStore:
    """The Parquet files of one run."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def written(self) -> set[str]:
        """Names of all completed files."""
        return {path.name for path in self.directory.glob("*.parquet")}

    def holds(self, name: str, num_records: int) -> bool:
        """True if the file exists, is readable and has this number of records."""
        try:
            return parquet.read_metadata(self.directory / name).num_rows == num_records
        except (OSError, pyarrow.ArrowException):
            return False

    def journal(self, name: str) -> Journal:
        """The answers of an incomplete file."""
        return Journal(self.directory / ".partial" / f"{name}.jsonl")

    def foreign(self) -> list[str]:
        """Files whose columns are those of another version of Paceline."""
        return [name for name in sorted(self.written()) if self._columns(name) != _COLUMNS]

    def _columns(self, name: str) -> list[str]:
        try:
            return parquet.read_schema(self.directory / name).names
        except (OSError, pyarrow.ArrowException):
            return _COLUMNS  # a damaged file is not foreign; it is written again

    def write(self, name: str, answers: Sequence[Answer]) -> None:
        """Write a file atomically.

        Raises:
            StorageError: the file could not be written.
        """
        table = pyarrow.Table.from_pylist([answer.model_dump() for answer in answers])
        for column, kind in _TYPES.items():  # those of a column without values are unknown
            index = table.column_names.index(column)
            table = table.set_column(index, column, table[column].cast(kind))
        with storage_errors(self.directory):
            self.directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self.directory, prefix=".writing.") as scratch:
                path = Path(scratch) / name
                with path.open("wb") as stream:
                    parquet.write_table(table, stream)
                    stream.flush()
                    os.fsync(stream.fileno())
                path.replace(self.directory / name)

    def read(self, names: Iterable[str] | None = None) -> list[Answer]:
        """Records of the given files (None: all), ordered by file name."""
        chosen = sorted(self.written() if names is None else names)
        tables = (parquet.read_table(self.directory / name) for name in chosen)
        return [Answer(**row) for table in tables for row in table.to_pylist()]

    def sweep(self) -> None:
        """Remove incomplete files of workers that were killed."""
        for scratch in self.directory.glob(".writing.*"):
            shutil.rmtree(scratch, ignore_errors=True)
