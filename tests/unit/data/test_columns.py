"""Columns of rows, for tasks."""

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from paceline.data.input_checks import InputChecks
from paceline.data.prompts import CorpusConfig, read_columns
from paceline.errors import PromptError

ROWS = [{"a": {"b": "one"}, "c": [1]}, {"a": {"b": "two"}, "c": None}]


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_named_columns_are_read_with_their_location(tmp_path: Path):
    path = write(tmp_path / "a.jsonl", *ROWS)
    assert list(read_columns(CorpusConfig(path=str(path)), ["a.b", "c"])) == [
        ({"a.b": "one", "c": [1]}, f"{path} line 1"),
        ({"a.b": "two", "c": None}, f"{path} line 2"),
    ]
    limited = CorpusConfig(path=str(path), limit=1)
    assert len(list(read_columns(limited, ["c"]))) == 1


def test_a_directory_of_parquet_files_is_read(tmp_path: Path):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    found = list(read_columns(CorpusConfig(path=str(tmp_path)), ["a.b", "c"]))
    assert [values for values, _ in found] == [{"a.b": "one", "c": [1]}, {"a.b": "two", "c": None}]


def test_a_line_of_text_is_one_column(tmp_path: Path):
    path = tmp_path / "a.txt"
    path.write_text("one\n\ntwo\n")
    found = list(read_columns(CorpusConfig(path=str(path)), ["text"]))
    assert found == [({"text": "one"}, f"{path} line 1"), ({"text": "two"}, f"{path} line 3")]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"a": {"c": "x"}}, "line 1 has no column a.b; its columns are a"),
        ({"a": "x"}, "line 1 has no column a.b; its columns are a"),
        ({"a": {"b": " "}}, "line 1 has an empty a.b; fill it or leave the line out"),
        ({"a": {"b": "\ud800"}}, "line 1 has half of a UTF-16 pair in its a.b; repair the text"),
    ],
)
def test_a_row_that_lacks_a_text_is_one_line(tmp_path: Path, row: Any, message: str):
    corpus = CorpusConfig(path=str(write(tmp_path / "a.jsonl", row)))
    with pytest.raises(PromptError) as caught:
        list(read_columns(corpus, ["a.b"]))
    assert str(caught.value).endswith(message)


def test_no_rows_and_files_of_several_kinds_are_one_line(tmp_path: Path):
    path = write(tmp_path / "a.jsonl")
    with pytest.raises(PromptError, match="holds no text; add at least one text"):
        list(read_columns(CorpusConfig(path=str(path)), []))
    (tmp_path / "b.txt").write_text("x")
    with pytest.raises(PromptError, match="files of several kinds"):
        list(read_columns(CorpusConfig(path=str(tmp_path)), []))


def test_a_text_is_counted_without_keeping_it(tmp_path: Path):
    path = write(tmp_path / "a.jsonl", *[{"text": "x" * 50_000}] * 200)
    checks = InputChecks()
    tracemalloc.start()
    checks.text("data.train", str(path))
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert checks.lines == [f"data.train: {path}, 200 texts"]
    assert most < path.stat().st_size / 4


@pytest.mark.parametrize(("streaming", "limit"), [(False, 20_000), (True, 1_000)])
def test_of_a_long_text_the_first_records_are_checked(tmp_path: Path, streaming: bool, limit: int):
    """The one behind them is not read; a text that ends before it is counted."""
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n' * limit + "not JSON\n")
    checks = InputChecks()
    checks.text("data.train", str(path), streaming=streaming)
    assert checks.lines == [f"data.train: {path}, checked the first {limit:,} texts"]
    path.write_text('{"text": "a"}\n' * (limit - 1))
    checks = InputChecks()
    checks.text("data.train", str(path), streaming=streaming)
    assert checks.lines == [f"data.train: {path}, {limit - 1:,} texts"]
