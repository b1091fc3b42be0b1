"""Distillation data on disk: Parquet files that are there whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pyarrow
from pyarrow import parquet
from pydantic import BaseModel, ConfigDict

from paceline.records import storage_errors

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class Answer(BaseModel):
    """One record: a prompt, what the target wrote, and everything that it hung on.

    Attributes:
        id: Of the prompt, and which answer to it.
        prompt: As text, with whatever the chat template put around it.
        completion: As text.
        prompt_tokens: What the target read, to the token.
        completion_tokens: What it wrote; its end-of-text token is the last, if it came to that.
        stop_reason: `eos`: it ended; `length`, `context`: it was cut off.
        target_fingerprint: Of its files.
        draft, draft_fingerprint: Empty where there was none.
        dtype, activations: In which the target computed.
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


_COLUMNS = list(Answer.model_fields)


class ShardStore:
    """The Parquet files of one run."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def written(self) -> set[str]:
        """Names of the files that are there, whole."""
        return {path.name for path in self.directory.glob("*.parquet")}

    def holds(self, name: str, num_records: int) -> bool:
        """Is this file there, with so many records? One that is damaged is not."""
        try:
            return parquet.read_metadata(self.directory / name).num_rows == num_records
        except (OSError, pyarrow.ArrowException):
            return False

    def foreign(self) -> list[str]:
        """Files of records that another version of Paceline wrote, by their columns."""
        return [name for name in sorted(self.written()) if self._columns(name) != _COLUMNS]

    def _columns(self, name: str) -> list[str]:
        try:
            return parquet.read_schema(self.directory / name).names
        except (OSError, pyarrow.ArrowException):
            return _COLUMNS  # damaged, and written again

    def write(self, name: str, answers: Sequence[Answer]) -> None:
        """Put a file in its place.

        Raises:
            StorageError: it could not be written; nothing of it is there.
        """
        table = pyarrow.Table.from_pylist([answer.model_dump() for answer in answers])
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
        """The records of some files, or of all, in order."""
        chosen = sorted(self.written() if names is None else names)
        tables = (parquet.read_table(self.directory / name) for name in chosen)
        return [Answer(**row) for table in tables for row in table.to_pylist()]

    def sweep(self) -> None:
        """Remove what killed workers left half-written."""
        for scratch in self.directory.glob(".writing.*"):
            shutil.rmtree(scratch, ignore_errors=True)
