"""Prompts of all kinds of files, and the messages of chats."""

import datetime
import gzip
import json
import tracemalloc
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import datasets
import pyarrow
import pytest
from pyarrow import parquet

from paceline.config import validate
from paceline.data.input_checks import InputChecks
from paceline.data.prompts import (
    CorpusConfig,
    corpus_fingerprint,
    read_columns,
    read_records,
    stream_records,
)
from paceline.errors import ConfigError, PromptError
from support.data import write_lines
from support.texts import CALL, TOOL

USER = {"role": "user", "content": "hi"}
ANSWER = {"role": "assistant", "content": "yo"}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_a_text_file_is_one_document_a_line(tmp_path: Path):
    """Without a byte order mark and blank lines; a line separator of Unicode ends no line."""
    text = "\ufeffone\r\n\n  two words \n\nthree\u2028still three\n"
    records = read_records(write(tmp_path / "a.txt", text))
    assert [record.text for record in records] == ["one", "two words", "three\u2028still three"]
    assert {record.kind for record in records} == {"document"}
    assert records[1].where.endswith("a.txt line 3")


@pytest.mark.parametrize(
    ("row", "kind", "text", "completion"),
    [
        ({"prompt": "p"}, "prompt", "p", None),
        ({"prompt": "p", "completion": "c", "id": 7}, "prompt", "p", "c"),
        ({"prompt": [3, 4], "completion": [5]}, "prompt", [3, 4], [5]),
        ({"text": "t"}, "document", "t", None),
        ({"tokens": [1, 2]}, "document", [1, 2], None),
    ],
)
def test_every_schema_of_a_line_is_understood(
    tmp_path: Path, row: dict[str, Any], kind: str, text: object, completion: object
):
    record = read_records(write(tmp_path / "a.jsonl", json.dumps(row)))[0]
    assert (record.kind, record.text, record.completion) == (kind, text, completion)


def test_limit_reads_the_first_texts_and_looks_no_further(tmp_path: Path):
    path = write(tmp_path / "a.jsonl", '{"text": "1"}\n{"text": "2"}\nnot json\n')
    records = read_records(CorpusConfig(path=str(path), limit=2))
    assert [record.text for record in records] == ["1", "2"]


def said(*given: Any) -> dict[str, Any]:
    """A chat whose answer has this content, or of this message."""
    return {"messages": [USER, *({"role": "assistant", "content": one} for one in given)]}


def part(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


def calls(given: Any) -> dict[str, Any]:
    return {"messages": [USER, {"role": "assistant", "tool_calls": given}]}


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (b"{oops}", "not JSON"),
        (b"[1, 2]", "not a JSON object"),
        (b'{"text": "\xff"}', "not UTF-8"),
        (b"[" * 100_000, "not JSON"),
        (b'{"text": ' + b"1" * 5000 + b"}", "not JSON"),
        (b'{"text": "a\0b"}', "not JSON"),
        ({"question": "q"}, "has the keys question"),
        ({}, "has the keys none"),
        ({"prompt": 3}, "has a int as prompt"),
        ({"prompt": ""}, "empty prompt"),
        ({"text": "  "}, "empty text"),
        ({"tokens": []}, "empty tokens"),
        ({"tokens": [1, True]}, "has a list as tokens"),
        ({"tokens": [1, -2]}, "has a list as tokens"),
        ({"prompt": "p", "completion": ["a"]}, "has a list as completion"),
        ({"prompt": "\ud800"}, "half of a UTF-16 pair"),
        *(({"messages": value}, "no list of messages") for value in ([], "hi", None)),
        ({"messages": [ANSWER]}, "nothing but an answer"),
        ({"messages": ["hi"]}, "has the message hi; wanted role and content"),
        ({"messages": [{"role": "user"}]}, "wanted role and content"),
        ({"messages": [{"role": None, "content": "x"}]}, "wanted role and content"),
        (part(3), "whose content is a int; wanted a string"),
        (part(None), "a message without text"),
        (part([]), "a message without text"),
        (part([{"type": "image_url"}]), "type image_url; on"),
        (part([3]), "a part of the type int"),
        (part("a\ud83d"), "half of a UTF-16 pair"),
        *((said(content), "has an empty answer") for content in ("", " \n", None)),
        (calls(3), "tool_calls of another form"),
        (calls(["x"]), "tool_calls of another form"),
        (calls("[{"), "has tool_calls that are not JSON"),
        (calls([{"function": {"name": "f", "arguments": "{"}}]), "not JSON: {"),
        ({"messages": [USER], "tools": "[{"}, "has tools that are not JSON"),
        ({"messages": [USER], "tools": 3}, "has 3 as tools; wanted a list of objects"),
        ({"messages": [USER], "tools": ["3"]}, "as tools; wanted a list of objects"),
        ({"messages": [USER], "chat_template_kwargs": [1]}, "wanted an object such as"),
    ],
)
def test_a_malformed_line_is_named_in_one_line(tmp_path: Path, line: Any, complaint: str):
    line = line if isinstance(line, bytes) else json.dumps(line).encode()
    path = write(tmp_path / "a.jsonl", b'{"prompt": "fine"}\n\n' + line + b"\n")
    with pytest.raises(PromptError, match=r"a\.jsonl line 3") as caught:
        read_records(path)
    assert complaint in str(caught.value)


_DAMAGED = r"cannot read .*a\.jsonl\.gz: .*; name a text file"


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("a.txt", b"", "holds no text"),
        ("a.txt", b"\n \n", "holds no text"),
        *((name, None, f"(?s){name}.*check the path") for name in ("b.txt", "b", "b.parquet")),
        ("a.pdf", b"x", "unknown kind of file"),
        ("b.parquet", b"PAR1 nothing", r"cannot load .*b\.parquet as a parquet"),
        ("a.jsonl.gz", b"plain", _DAMAGED),
        ("a.jsonl.gz", gzip.compress(b"{}" * 999, mtime=0)[:-9], _DAMAGED),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_by_name(
    tmp_path: Path, name: str, content: bytes | None, complaint: str
):
    if content is not None:
        write(tmp_path / name, content)
    with pytest.raises(PromptError, match=complaint):
        read_records(tmp_path / name)


@pytest.mark.parametrize(
    "row",
    [
        *({"text": value} for value in ("", " \n", None)),
        *({"tokens": []}, {"prompt": None}, {"prompt": "a", "completion": ""}, {}),
        *({"messages": []}, {"messages": None}),
        said(None),
    ],
)
def test_rows_without_text_are_counted_in_training_text_and_refused_elsewhere(
    tmp_path: Path, row: dict[str, Any]
):
    rows = [row, {"text": "1"}, row, {"text": "2"}, {"text": "3"}]
    path = write_lines(tmp_path / "a.jsonl", *rows)
    corpus = CorpusConfig(path=str(path))
    with pytest.raises(PromptError, match=r"a\.jsonl line 1 has"):
        read_records(corpus)
    left_out = r"a\.jsonl: rows without text are left out: 2, the first is .*a\.jsonl line 1$"
    for read in (partial(read_records, skip_empty=True), stream_records):
        with pytest.warns(UserWarning, match=left_out):
            assert [record.text for record in read(corpus)] == ["1", "2", "3"]
        with pytest.warns(UserWarning, match=left_out):
            assert [record.text for record in read(corpus.first(2))] == ["1", "2"]
    alone = write(tmp_path / "b.jsonl", json.dumps(row))
    with (
        pytest.warns(UserWarning, match="out: 1, the first"),
        pytest.raises(PromptError, match="holds no text"),
    ):
        read_records(alone, skip_empty=True)


def test_a_directory_with_the_schema_of_a_hub_data_set_is_read_by_its_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets-cache")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_OFFLINE", True)
    rows = [{"translation": {"de": de, "en": en}} for de, en in (("Hallo", "Hello"), ("B", "A"))]
    write_lines(tmp_path / "wmt" / "test.jsonl", *rows)
    columns = {"prompt_field": "translation.en", "completion_field": "translation.de"}
    corpus = CorpusConfig(path=str(tmp_path / "wmt"), split="test", **columns)
    found = [(record.text, record.completion) for record in read_records(corpus)]
    assert found == [("Hello", "Hallo"), ("A", "B")]
    with pytest.raises(PromptError, match="row 0 has no column question; its columns are transl"):
        read_records(corpus.model_copy(update={"prompt_field": "question"}))
    with pytest.raises(PromptError, match="cannot load"):
        read_records(CorpusConfig(path="no-such-organisation/no-such-set"))
    with pytest.raises(ConfigError, match="needs prompt_field"):
        validate(CorpusConfig, {"path": "a", "completion_field": "answer"})


def test_columns_of_others_that_look_like_ours_are_left_alone(tmp_path: Path):
    row = {"prompt": "a", "completion": "b", "prompt_tokens": 3, "completion_tokens": 4}
    path = write_lines(tmp_path / "api.jsonl", row | {"stop_reason": "end_turn"})
    (record,) = read_records(path)
    assert (record.text, record.completion, record.open_ended) == ("a", "b", False)


ROWS = [
    {"text": "a a"},
    {"text": "2024-01-01"},
    {"prompt": "x", "completion": "12"},
    {"messages": [{"role": "user", "content": "hi"}]},
]


@pytest.mark.parametrize("names", ["train test dev", "a-train b.test dev-00000-of-1", "1 2 3"])
def test_a_directory_has_the_rows_of_its_files_whatever_their_names(tmp_path: Path, names: str):
    """The datasets library takes names for splits, dates for datetimes and rows for one schema."""
    for name, rows in zip(names.split(), (ROWS, ROWS[1:3], ROWS[::-1]), strict=True):
        write_lines(tmp_path / f"{name}.jsonl", *rows)
    write(tmp_path / "README.md", "---\nconfigs:\n- config_name: a\n---\n")
    alone = [read_records(file) for file in sorted(tmp_path.glob("*.jsonl"))]
    assert read_records(tmp_path) == [record for records in alone for record in records]
    assert len(read_records(tmp_path)) == 10


def test_a_parquet_file_has_its_rows_whatever_their_arrow_types(tmp_path: Path):
    values = pyarrow.array(["2024-01-01", "b", "2024-01-01"])
    columns = {
        "plain": values,
        "large": values.cast(pyarrow.large_string()),
        "categorical": values.dictionary_encode(),
    }
    for split, (name, column) in zip(("train", "test", "dev"), columns.items(), strict=True):
        parquet.write_table(pyarrow.table({"text": column}), tmp_path / f"{name}-{split}.parquet")
    texts = [record.text for record in read_records(tmp_path)]
    assert texts == values.to_pylist() * 3
    assert read_records(tmp_path / "large-test.parquet")[1].where.endswith("parquet row 1")


def test_a_pattern_names_the_directories_of_several_runs(tmp_path: Path):
    for run in ("a", "b"):
        (tmp_path / run / "data").mkdir(parents=True)
        write(tmp_path / run / "data" / "1.jsonl", f'{{"text": "{run}1"}}\n{{"text": "{run}2"}}\n')
        write(tmp_path / run / "metrics.txt", "no")
    corpus = CorpusConfig(path=f"{tmp_path}/*/data", limit=3)
    assert [record.text for record in read_records(corpus)] == ["a1", "a2", "b1"]
    columns = read_columns(CorpusConfig(path=f"{tmp_path}/*/data/*.jsonl"), ["text"])
    assert [values["text"] for values, _ in columns] == ["a1", "a2", "b1", "b2"]
    before = corpus_fingerprint(corpus)
    assert before
    write(tmp_path / "b" / "data" / "1.jsonl", '{"text": "other"}\n')
    assert corpus_fingerprint(corpus) != before
    with pytest.raises(PromptError, match=r"no file or directory matches .*\*/none"):
        read_records(f"{tmp_path}/*/none")


def test_tokens_that_say_how_they_ended_are_as_they_are(tmp_path: Path):
    """The target may stop at a token other than its tokenizer's end of text: nothing follows it."""
    tokens = {"prompt_tokens": [3, 4], "completion_tokens": [5, 9]}
    text = {"prompt": "a", "completion": "b"}
    rows = [row | {"stop_reason": reason} for row in (tokens, text) for reason in ("eos", "length")]
    path = write_lines(tmp_path / "a.jsonl", *rows)
    assert [record.open_ended for record in read_records(path)] == [True, True, False, True]


def test_the_data_files_of_a_directory_are_those_in_sight(tmp_path: Path):
    for name, text in (("a.txt", "one"), ("B.TXT", "two"), (".c.txt", "no"), ("d.md", "no")):
        (tmp_path / name).write_text(text)
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "e.txt").write_text("no")
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "f.txt").write_text("three")
    assert [record.text for record in read_records(tmp_path)] == ["two", "one", "three"]
    corpus = CorpusConfig(path=str(tmp_path))
    before = corpus_fingerprint(corpus)
    (tmp_path / ".cache" / "e.txt").write_text("something else")
    (tmp_path / "d.md").write_text("something else")
    assert corpus_fingerprint(corpus) == before
    (tmp_path / "more" / "f.txt").write_text("thr33")
    assert corpus_fingerprint(corpus) != before
    assert corpus_fingerprint(CorpusConfig(path=str(tmp_path / "nothing.jsonl"))) == ""
    with patch("paceline.data.prompts.files_fingerprint", side_effect=PermissionError):
        assert corpus_fingerprint(corpus) == "", "whatever reads it says what is wrong"
    write(tmp_path / "3.jsonl", '{"text": "fourth"}\n')
    with pytest.raises(PromptError, match=r"several kinds, \.jsonl, \.txt; give each kind"):
        read_records(tmp_path)


def test_calls_have_parsed_arguments_and_parts_are_texts(tmp_path: Path):
    row = {"messages": [{"role": "user", "content": ["a", {"type": "text", "text": "b"}]}, CALLED]}
    user, called = read_records(write_lines(tmp_path / "a.jsonl", row))[0].messages
    assert user["content"] == [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert called["content"] == ""
    function = {"name": "weather", "arguments": {"city": "Oslo"}}
    assert called["tool_calls"] == [{"type": "function", "function": function}]


def test_a_parquet_file_has_the_chats_that_json_lines_have(tmp_path: Path):
    """Arrow adds the keys of other messages and tools, with None."""
    rows = [
        {"messages": [USER, CALLED, {"role": "tool", "name": "weather", "content": "wet"}]},
        {"messages": [USER | {"content": "x"}, ANSWER], "tools": [TOOL], "id": "a"},
    ]
    write_lines(tmp_path / "a.jsonl", *rows)
    parquet.write_table(
        pyarrow.Table.from_pylist([{"tools": None, "id": None} | r for r in rows]),
        tmp_path / "a.parquet",
    )
    found = [read_records(tmp_path / name) for name in ("a.jsonl", "a.parquet")]
    for one, other in zip(*found, strict=True):
        assert (one.messages, one.tools, one.id) == (other.messages, other.tools, other.id)


def test_dates_and_bytes_beside_the_text_of_a_message_are_read(tmp_path: Path):
    """As in WildChat: each message has a timestamp."""
    when = datetime.datetime(2024, 5, 17, 8, 30)
    message = {"role": "user", "content": "hi", "timestamp": when, "hash": b"\x00a"}
    path = tmp_path / "chats.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([{"messages": [message]}] * 2), path)
    first, second = read_records(str(path))
    (found,) = first.messages
    assert (found["role"], found["content"]) == ("user", "hi")
    assert found["timestamp"] == str(when)
    assert first.asked == second.asked
    json.dumps(first.messages)  # for servers, and for the process that renders templates


def texts(folder: Path, split: str | None = None, **more: str) -> list[str]:
    found = [read_records, lambda corpus: list(stream_records(corpus))]
    corpus = CorpusConfig(path=str(folder), split=split, **more)
    first, second = ([str(record.text) for record in read(corpus)] for read in found)
    assert first == second
    return first


def test_a_split_is_found_by_the_names_of_files(tmp_path: Path):
    for split in ("train", "test"):
        write_lines(tmp_path / f"{split}-1.jsonl", {"text": split})
    assert texts(tmp_path, "test") == ["test"]
    assert texts(tmp_path) == ["test", "train"]
    with pytest.raises(PromptError, match="Unknown split"):
        read_records(CorpusConfig(path=str(tmp_path), split="dev"))
    write_lines(tmp_path / "main/train.jsonl", {"text": "main"})
    assert texts(tmp_path, subset="main") == ["main"], "a directory"


@pytest.mark.parametrize(("name", "mark"), [("a.csv", ","), ("a.tsv", "\t")])
def test_tables_are_read_with_their_own_separator(tmp_path: Path, name: str, mark: str):
    (tmp_path / name).write_text(f"id{mark}text\n1{mark}one\n2{mark}two\n")
    assert texts(tmp_path) == ["one", "two"]


@pytest.mark.parametrize("fill", [(), ("picture.png", "script.py", "notes.yaml")])
def test_a_directory_without_data_is_one_line(tmp_path: Path, fill: tuple[str, ...]):
    for name in fill:
        (tmp_path / name).write_text("x")
    with pytest.raises(PromptError, match="cannot load"):
        read_records(str(tmp_path))


@pytest.mark.parametrize("name", ["/etc/passwd", "file:///etc/passwd"])
def test_a_data_set_of_the_hub_names_no_file_of_this_machine(
    name: str, monkeypatch: pytest.MonkeyPatch
):
    files = {"train": ["hf://datasets/a/b@1/x.jsonl", name]}
    found = SimpleNamespace(config=SimpleNamespace(data_files=files))
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda *_: found)
    with pytest.raises(PromptError, match=f"names {name}, and only files of the hub are read"):
        read_records("organisation/set")


COLUMNS = [{"a": {"b": "one"}, "c": [1]}, {"a": {"b": "two"}, "c": None}]


def test_named_columns_are_read_with_their_location(tmp_path: Path):
    path = write_lines(tmp_path / "a.jsonl", *COLUMNS)
    assert list(read_columns(CorpusConfig(path=str(path)), ["a.b", "c"])) == [
        ({"a.b": "one", "c": [1]}, f"{path} line 1"),
        ({"a.b": "two", "c": None}, f"{path} line 2"),
    ]
    limited = CorpusConfig(path=str(path), limit=1)
    assert len(list(read_columns(limited, ["c"]))) == 1
    (tmp_path / "more").mkdir()
    parquet.write_table(pyarrow.Table.from_pylist(COLUMNS), tmp_path / "more" / "a.parquet")
    found = list(read_columns(CorpusConfig(path=str(tmp_path / "more")), ["a.b", "c"]))
    assert [values for values, _ in found] == [{"a.b": "one", "c": [1]}, {"a.b": "two", "c": None}]


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
    corpus = CorpusConfig(path=str(write_lines(tmp_path / "a.jsonl", row)))
    with pytest.raises(PromptError) as caught:
        list(read_columns(corpus, ["a.b"]))
    assert str(caught.value).endswith(message)


def test_a_text_is_counted_without_keeping_it(tmp_path: Path):
    path = write_lines(tmp_path / "a.jsonl", *[{"text": "x" * 50_000}] * 200)
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
