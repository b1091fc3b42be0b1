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
from support.data import write_rows
from support.texts import CALL, TOOL


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_a_text_file_is_one_document_a_line_and_blank_lines_do_not_count(tmp_path: Path):
    records = read_records(write(tmp_path / "a.txt", "one\r\n\n  two words \n\n"))
    assert [(record.kind, record.text) for record in records] == [
        ("document", "one"),
        ("document", "two words"),
    ]
    assert records[1].where.endswith("a.txt line 3")


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path: Path):
    assert read_records(write(tmp_path / "a.txt", b"\xef\xbb\xbfone\n"))[0].text == "one"


def test_a_line_separator_inside_a_text_does_not_split_it(tmp_path: Path):
    records = read_records(write(tmp_path / "a.txt", "one\u2028still one\n"))
    assert [record.text for record in records] == ["one\u2028still one"]


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


def test_messages_are_a_chat(tmp_path: Path):
    messages = [{"role": "user", "content": "hello"}]
    record = read_records(write(tmp_path / "a.jsonl", json.dumps({"messages": messages})))[0]
    assert record.kind == "chat"
    assert list(record.messages) == messages


def test_limit_reads_the_first_texts_and_looks_no_further(tmp_path: Path):
    path = write(tmp_path / "a.jsonl", '{"text": "1"}\n{"text": "2"}\nnot json\n')
    records = read_records(CorpusConfig(path=str(path), limit=2))
    assert [record.text for record in records] == ["1", "2"]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (b"{oops}", "not JSON"),
        (b"[1, 2]", "not a JSON object"),
        (b'{"question": "q"}', "has the keys question"),
        (b"{}", "has the keys none"),
        (b'{"prompt": 3}', "has a int as prompt"),
        (b'{"prompt": ""}', "empty prompt"),
        (b'{"text": "  "}', "empty text"),
        (b'{"tokens": []}', "empty tokens"),
        (b'{"tokens": [1, true]}', "has a list as tokens"),
        (b'{"tokens": [1, -2]}', "has a list as tokens"),
        (b'{"prompt": "p", "completion": ["a"]}', "has a list as completion"),
        (b'{"prompt": "\\ud800"}', "half of a UTF-16 pair"),
        (b'{"messages": []}', "no list of messages"),
        (b'{"messages": [{"role": "user"}]}', "wanted role and content"),
        (b'{"messages": [{"role": "assistant", "content": "a"}]}', "nothing but an answer"),
        (b'{"text": "\xff"}', "not UTF-8"),
        (b"[" * 100_000, "not JSON"),
        (b'{"text": ' + b"1" * 5000 + b"}", "not JSON"),
        (b'{"text": "a\0b"}', "not JSON"),
    ],
)
def test_a_malformed_line_is_named_in_one_line(tmp_path: Path, line: bytes, complaint: str):
    path = write(tmp_path / "a.jsonl", b'{"prompt": "fine"}\n\n' + line + b"\n")
    with pytest.raises(PromptError, match="line 3") as caught:
        read_records(path)
    assert complaint in str(caught.value)


@pytest.mark.parametrize(
    "row",
    [
        *({"text": value} for value in ("", " \n", None)),
        *({"tokens": []}, {"prompt": None}, {"prompt": "a", "completion": ""}, {}),
        *({"messages": []}, {"messages": None}),
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": None}]},
    ],
)
def test_rows_without_text_are_counted_in_training_text_and_refused_elsewhere(
    tmp_path: Path, row: dict[str, Any]
):
    rows = [row, {"text": "1"}, row, {"text": "2"}, {"text": "3"}]
    path = write(tmp_path / "a.jsonl", "".join(json.dumps(each) + "\n" for each in rows))
    corpus = CorpusConfig(path=str(path))
    with pytest.raises(PromptError, match=r"a\.jsonl line 1 has"):
        read_records(corpus)
    said = r"a\.jsonl: rows without text are left out: 2, the first is .*a\.jsonl line 1$"
    for read in (partial(read_records, skip_empty=True), stream_records):
        with pytest.warns(UserWarning, match=said):
            assert [record.text for record in read(corpus)] == ["1", "2", "3"]
        with pytest.warns(UserWarning, match=said):
            assert [record.text for record in read(corpus.first(2))] == ["1", "2"]
    alone = write(tmp_path / "b.jsonl", json.dumps(row))
    with (
        pytest.warns(UserWarning, match="out: 1, the first"),
        pytest.raises(PromptError, match="holds no text"),
    ):
        read_records(alone, skip_empty=True)


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_an_empty_file_is_refused(tmp_path: Path, content: str):
    with pytest.raises(PromptError, match="holds no text"):
        read_records(write(tmp_path / "a.txt", content))


@pytest.mark.parametrize("name", ["missing.txt", "missing.jsonl", "missing", "missing.parquet"])
def test_a_path_with_nothing_there_is_refused(tmp_path: Path, name: str):
    with pytest.raises(PromptError, match=f"(?s){name}.*check the path"):
        read_records(tmp_path / name)


def test_a_file_of_an_unknown_kind_is_refused(tmp_path: Path):
    with pytest.raises(PromptError, match="unknown kind of file"):
        read_records(write(tmp_path / "a.pdf", "x"))


@pytest.fixture
def _no_shared_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets-cache")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_OFFLINE", True)


@pytest.mark.usefixtures("_no_shared_cache")
def test_a_directory_with_the_schema_of_a_hub_data_set_is_read_by_its_columns(tmp_path: Path):
    folder = tmp_path / "wmt"
    folder.mkdir()
    rows = [
        {"translation": {"de": "Hallo", "en": "Hello"}},
        {"translation": {"de": "B", "en": "A"}},
    ]
    write(folder / "test.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    corpus = CorpusConfig(
        path=str(folder),
        split="test",
        prompt_field="translation.en",
        completion_field="translation.de",
    )
    records = read_records(corpus)
    assert [(record.text, record.completion) for record in records] == [
        ("Hello", "Hallo"),
        ("A", "B"),
    ]
    with pytest.raises(PromptError, match="row 0 has no column question; its columns are transl"):
        read_records(corpus.model_copy(update={"prompt_field": "question"}))


@pytest.mark.usefixtures("_no_shared_cache")
def test_a_missing_split_or_hub_name_is_one_line(tmp_path: Path):
    folder = tmp_path / "set"
    folder.mkdir()
    write(folder / "train.jsonl", '{"text": "t"}\n')
    for corpus in (
        CorpusConfig(path=str(folder), split="validation"),
        CorpusConfig(path="no-such-organisation/no-such-set"),
    ):
        with pytest.raises(PromptError, match="cannot load"):
            read_records(corpus)


def test_a_completion_column_needs_a_prompt_column():
    with pytest.raises(ConfigError, match="needs prompt_field"):
        validate(CorpusConfig, {"path": "a", "completion_field": "answer"})


def test_columns_of_others_that_look_like_ours_are_left_alone(tmp_path: Path):
    path = tmp_path / "api.jsonl"
    row = {"prompt": "a", "completion": "b", "prompt_tokens": 3, "completion_tokens": 4}
    path.write_text(json.dumps(row | {"stop_reason": "end_turn"}) + "\n")
    (record,) = read_records(path)
    assert (record.text, record.completion, record.open_ended) == ("a", "b", False)


def test_a_damaged_data_set_is_one_line(tmp_path: Path):
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "a.jsonl").write_text('{"text": "a b"}\n{"text": \n')
    with pytest.raises(PromptError, match=r"a\.jsonl line 2 is not JSON"):
        read_records(folder)
    (tmp_path / "b.parquet").write_bytes(b"PAR1 nothing")
    with pytest.raises(PromptError, match=r"cannot load .*b\.parquet as a parquet"):
        read_records(tmp_path / "b.parquet")


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
        write(tmp_path / f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
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


def test_an_empty_parquet_file_is_refused_by_name(tmp_path: Path):
    empty = tmp_path / "empty.parquet"
    parquet.write_table(pyarrow.table({"text": pyarrow.array([], pyarrow.string())}), empty)
    with pytest.raises(PromptError, match=r"empty\.parquet holds no text"):
        read_records(empty)


@pytest.mark.parametrize("content", [b"plain", gzip.compress(b"{}" * 999, mtime=0)[:-9]])
def test_a_damaged_gz_file_is_one_line(tmp_path: Path, content: bytes):
    with pytest.raises(PromptError, match=r"cannot read .*a\.jsonl\.gz: .*; name a text file"):
        read_records(write(tmp_path / "a.jsonl.gz", content))


def test_a_directory_of_text_is_read_as_its_files_are(tmp_path: Path):
    (tmp_path / "b").mkdir()
    write(tmp_path / "b" / "2.txt", "third\n")
    write(tmp_path / "1.txt", "first\n\n  \nsecond\n")
    assert [record.text for record in read_records(tmp_path)] == ["first", "second", "third"]
    write(tmp_path / "3.jsonl", '{"text": "fourth"}\n')
    with pytest.raises(PromptError, match=r"several kinds, \.jsonl, \.txt; give each kind"):
        read_records(tmp_path)


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
    path = write(tmp_path / "a.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
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


USER = {"role": "user", "content": "hi"}
ANSWER = {"role": "assistant", "content": "yo"}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}


def broken(**call: Any) -> dict[str, Any]:
    return {"messages": [USER, {"role": "assistant", **call}]}


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({"messages": "hi"}, "no list of messages"),
        ({"messages": None}, "no list of messages"),
        ({"messages": ["hi"]}, "has the message hi; wanted role and content"),
        ({"messages": [{"role": None, "content": "x"}]}, "wanted role and content"),
        ({"messages": [{"role": "user", "content": 3}]}, "whose content is a int; wanted a string"),
        ({"messages": [{"role": "user", "content": None}]}, "a message without text"),
        ({"messages": [{"role": "user", "content": []}]}, "a message without text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "type image_url; on",
        ),
        ({"messages": [{"role": "user", "content": [3]}]}, "a part of the type int"),
        ({"messages": [{"role": "user", "content": "a\ud83d"}]}, "half of a UTF-16 pair"),
        (broken(content=""), "has an empty answer"),
        (broken(content=" \n"), "has an empty answer"),
        (broken(content=None), "has an empty answer"),
        (broken(tool_calls=3), "tool_calls of another form"),
        (broken(tool_calls=["x"]), "tool_calls of another form"),
        (broken(tool_calls="[{"), "has tool_calls that are not JSON"),
        (broken(tool_calls=[{"function": {"name": "f", "arguments": "{"}}]), "not JSON: {"),
        ({"messages": [USER], "tools": "[{"}, "has tools that are not JSON"),
        ({"messages": [USER], "tools": 3}, "has 3 as tools; wanted a list of objects"),
        ({"messages": [USER], "tools": ["3"]}, "as tools; wanted a list of objects"),
        ({"messages": [USER], "chat_template_kwargs": [1]}, "wanted an object such as"),
    ],
)
def test_a_chat_of_another_form_is_one_line_that_names_it(
    tmp_path: Path, row: dict[str, Any], complaint: str
):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": [USER]}) + "\n" + json.dumps(row) + "\n")
    with pytest.raises(PromptError, match=r"a\.jsonl line 2") as caught:
        read_records(path)
    assert complaint in str(caught.value)


def test_calls_have_parsed_arguments_and_parts_are_texts(tmp_path: Path):
    row = {"messages": [{"role": "user", "content": ["a", {"type": "text", "text": "b"}]}, CALLED]}
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(row) + "\n")
    user, called = read_records(path)[0].messages
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
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
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
        write_rows(tmp_path / f"{split}-1.jsonl", {"text": split})
    assert texts(tmp_path, "test") == ["test"]
    assert texts(tmp_path) == ["test", "train"]
    with pytest.raises(PromptError, match="Unknown split"):
        read_records(CorpusConfig(path=str(tmp_path), split="dev"))


@pytest.mark.parametrize(("name", "mark"), [("a.csv", ","), ("a.tsv", "\t")])
def test_tables_are_read_with_their_own_separator(tmp_path: Path, name: str, mark: str):
    (tmp_path / name).write_text(f"id{mark}text\n1{mark}one\n2{mark}two\n")
    assert texts(tmp_path) == ["one", "two"]


def test_a_subset_is_a_directory(tmp_path: Path):
    write_rows(tmp_path / "main/train.jsonl", {"text": "main"})
    write_rows(tmp_path / "other/train.jsonl", {"text": "other"})
    assert texts(tmp_path, subset="main") == ["main"]


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
    path = write_rows(tmp_path / "a.jsonl", *COLUMNS)
    assert list(read_columns(CorpusConfig(path=str(path)), ["a.b", "c"])) == [
        ({"a.b": "one", "c": [1]}, f"{path} line 1"),
        ({"a.b": "two", "c": None}, f"{path} line 2"),
    ]
    limited = CorpusConfig(path=str(path), limit=1)
    assert len(list(read_columns(limited, ["c"]))) == 1


def test_a_directory_of_parquet_files_is_read(tmp_path: Path):
    parquet.write_table(pyarrow.Table.from_pylist(COLUMNS), tmp_path / "a.parquet")
    found = list(read_columns(CorpusConfig(path=str(tmp_path)), ["a.b", "c"]))
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
    corpus = CorpusConfig(path=str(write_rows(tmp_path / "a.jsonl", row)))
    with pytest.raises(PromptError) as caught:
        list(read_columns(corpus, ["a.b"]))
    assert str(caught.value).endswith(message)


def test_a_text_is_counted_without_keeping_it(tmp_path: Path):
    path = write_rows(tmp_path / "a.jsonl", *[{"text": "x" * 50_000}] * 200)
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
