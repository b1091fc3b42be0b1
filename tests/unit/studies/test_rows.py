import errno
import gzip
import json
import os
from pathlib import Path

import pytest

from paceline import records
from paceline.data import text_files
from paceline.errors import StorageError, UsageError
from paceline.results.row import pooled, read_rows, write_rows
from support.results import study_row

ROWS = [
    study_row({"tokens": [3, 4.5], "score": [None, 1]}, task="text", temperature=0.5),
    study_row({"tokens": [1]}, family="autoregressive", temperature=0.0),
]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz"])
def test_rows_are_read_as_they_were_written_and_equal_rows_give_equal_files(
    tmp_path: Path, name: str
):
    for folder in ("one", "two"):
        write_rows(tmp_path / folder / name, ROWS)
    assert read_rows(tmp_path / "one" / name) == ROWS
    files = [tmp_path / folder / name for folder in ("one", "two")]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert sorted((tmp_path / "one").iterdir()) == [files[0]]


def test_a_compressed_file_has_no_date(tmp_path: Path):
    """Bytes 4 to 7 of a gzip file are its time: RFC 1952."""
    write_rows(tmp_path / "rows.jsonl.gz", ROWS)
    assert (tmp_path / "rows.jsonl.gz").read_bytes()[4:8] == bytes(4)


def test_rows_of_another_schema_and_malformed_ones_are_one_line(tmp_path: Path):
    file = tmp_path / "rows.jsonl"
    write_rows(file, ROWS)
    first = file.read_text().splitlines()[0]
    values = json.loads(first)
    for row, said in (
        (
            values | {"schema_version": 0},
            r"rows\.jsonl row 2 has schema_version 0, .* reads 1; run",
        ),
        (values | {"units": [1]}, r"row 2 is not a result row: .*2 values for 1 units"),
        (values | {"sums": {}}, "row 2 is not a result row: .*needs sums, totals or an error"),
        ([1], "row 2 has schema_version None"),
    ):
        file.write_text(f"{first}\n{json.dumps(row)}\n")
        with pytest.raises(UsageError, match=said) as caught:
            read_rows(file)
        assert "\n" not in str(caught.value)


def test_rows_that_cannot_be_written_leave_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    file = tmp_path / "rows.jsonl"
    write_rows(file, ROWS)
    before = file.read_bytes()

    def full(_handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match="the disk is full"):
        write_rows(file, ROWS[:1])
    assert file.read_bytes() == before
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz"])
def test_a_torn_file_is_one_line(tmp_path: Path, name: str):
    write_rows(tmp_path / name, ROWS)
    whole = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(whole[:-20])
    with pytest.raises(UsageError, match="is not a file of result rows"):
        read_rows(tmp_path / name)
    with pytest.raises(UsageError, match="no result rows at"):
        read_rows(tmp_path / "none.jsonl")


def test_a_damaged_compressed_file_is_one_line(tmp_path: Path):
    file = tmp_path / "rows.jsonl.gz"
    content = bytearray(gzip.compress(b'{"a": 1}\n' * 50, mtime=0))
    content[12:16] = b"\xff\xff\xff\xff"
    file.write_bytes(content)
    with pytest.raises(UsageError, match="is not a file of result rows"):
        read_rows(file)


def test_rows_of_other_examples_are_pooled_in_their_order():
    rows = [
        study_row({"tokens": [5, 6]}, [2, 3], task="text"),
        study_row({"tokens": [7, 8]}, [0, 1], task="text"),
    ]
    found = pooled(rows)
    assert dict(zip(found.units, found.sums["tokens"], strict=True)) == {2: 5, 3: 6, 0: 7, 1: 8}


@pytest.mark.parametrize("other", [study_row({"tokens": [1]}), study_row({"calls": [1]}, [9])])
def test_rows_of_the_same_examples_or_of_other_sums_are_not_pooled(other):
    with pytest.raises(UsageError, match="two rows of tiny measure the same examples of prompts"):
        pooled([study_row({"tokens": [1]}), other])


def test_a_file_that_decompresses_without_end_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(records, "_MOST_BYTES", 100_000)
    for content in (b" " * 1_000_000, b"\n" * 500_000):
        file = tmp_path / "rows.jsonl.gz"
        file.write_bytes(gzip.compress(content))
        for read in (read_rows, lambda path: list(text_files.read_file(path))):
            with pytest.raises(UsageError, match="decompresses to more than 100 times") as caught:
                read(file)
            assert "\n" not in str(caught.value)


@pytest.mark.parametrize("line", ["[" * 5000, '{"a": ' + "9" * 5000 + "}"])
def test_a_line_that_python_cannot_read_is_one_line(tmp_path: Path, line: str):
    file = tmp_path / "rows.jsonl"
    file.write_text(line)
    with pytest.raises(UsageError, match="is not a file of result rows"):
        read_rows(file)
