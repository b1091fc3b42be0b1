"""Stores distillation data as Parquet files, written atomically."""

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
        dtype, activations: Precision of the target's weights and activations.
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
        """Names of all completed files."""
        return {path.name for path in self.directory.glob("*.parquet")}

    def holds(self, name: str, num_records: int) -> bool:
        """True if the file exists, is readable and has this number of records."""
        try:
            return parquet.read_metadata(self.directory / name).num_rows == num_records
        except (OSError, pyarrow.ArrowException):
            return False

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
