import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from chat_families import CALL, TOOL
from paceline.config import validate
from paceline.data.prompts import CorpusConfig, read_records
from paceline.errors import ConfigError, PromptError

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
        ({"messages": [USER], "chat_template_kwargs": {"tokenize": True}}, "which Paceline sets"),
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
    assert "\n" not in str(caught.value)


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


def test_arguments_that_paceline_sets_are_refused_in_a_configuration():
    with pytest.raises(ConfigError, match="has add_generation_prompt in chat_template_kwargs"):
        validate(CorpusConfig, {"path": "a", "chat_template_kwargs": {"add_generation_prompt": 1}})
