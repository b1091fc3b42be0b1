"""Reading logged requests: which lines are new, what of them is kept, and which are chosen."""

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import ConfigError
from paceline.follow.log import LogConfig, Read, read

MAIL = r"\S+@\S+"


def write(path: Path, *rows: Any, end: str = "\n") -> None:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    with path.open("a") as stream:
        stream.write("\n".join(lines) + end)


def taken(folder: Path, before: Read | None = None, count: int = 100, **settings: Any) -> Read:
    most = settings.pop("most", None)
    config = LogConfig(path=str(folder / "*.jsonl*"), **settings)
    positions = {} if before is None else before.positions
    return read(config, positions, count, key="k", now=5.0, most=most)


def prompts(found: Read) -> list[Any]:
    return [one.row.get("prompt") or one.row.get("messages") for one in found.chosen]


ASKED = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "a"}, ["a"]),
        ({"request": {"prompt": ["a", "b"]}, "response": {"prompt": "no"}}, ["a", "b"]),
        ({"body": {"prompt": [[7, 8], [9]]}}, [[7, 8], [9]]),
        ({"request": {"body": {"prompt": [7, 8]}}}, [[7, 8]]),
        ({"text": "a log line", "request": {"body": json.dumps({"prompt": "a"})}}, ["a"]),
        ({"messages": [*ASKED, {"role": "assistant", "content": "x"}]}, [ASKED]),
    ],
)
def test_requests_of_several_kinds_of_logs(tmp_path: Path, row: Any, expected: Any):
    write(tmp_path / "a.jsonl", row)
    assert prompts(taken(tmp_path)) == expected


def test_a_line_is_read_once_and_when_it_is_whole(tmp_path: Path):
    log = tmp_path / "a.jsonl"
    write(log, {"prompt": "one"}, '{"prompt": "tw', end="")
    first = taken(tmp_path)
    write(log, 'o"}', {"prompt": "three"})
    second = taken(tmp_path, first)
    assert (prompts(first), prompts(second)) == (["one"], ["two", "three"])
    assert taken(tmp_path, second).num_requests == 0


@pytest.mark.parametrize("how", ["rename", "copy", "copy elsewhere", "link", "same inode"])
def test_a_file_is_known_again_under_any_name(tmp_path: Path, how: str):
    """As log rotation does; the new file is soon longer than the old one was."""
    log, old = tmp_path / "a.jsonl", tmp_path / "a.jsonl.1"
    write(log, {"prompt": "one"})
    first = taken(tmp_path)
    write(log, {"prompt": "two"})
    match how:
        case "rename":
            log.rename(old)
        case "copy" | "copy elsewhere":
            shutil.copy(log, old if how == "copy" else tmp_path / "other")
            log.write_text("")
        case "link":
            old.symlink_to(log)
        case _:
            second = taken(tmp_path, first)
            log.write_text("")
            write(log, *[{"prompt": f"new {number}"} for number in range(5)])
            assert len(prompts(taken(tmp_path, second))) == 5
            return
    write(log, *[{"prompt": f"new {number}"} for number in range(5)])
    second = taken(tmp_path, first)
    lost = ["two"] if how != "copy elsewhere" else []
    assert sorted(prompts(second)) == [f"new {number}" for number in range(5)] + lost
    assert second.num_requests == 5 + len(lost), "and no line is read twice"
    assert taken(tmp_path, second).num_requests == 0


def test_what_cannot_be_read_is_counted(tmp_path: Path):
    bad = ["no json", '["a"]', {"response": "a"}, {"prompt": ""}, {"messages": 3}, {"prompt": []}]
    bad += ["[" * 100_000, {"messages": []}, {"messages": [{"role": "assistant", "content": "a"}]}]
    deep = json.dumps({"prompt": "a", "tools": [0]}).replace("0", "[" * 900 + "]" * 900)
    bad += [deep, '{"prompt": "a", "at": 1%s}' % ("0" * 400), {"prompt": "a\ud800"}]
    bad += [{"prompt": "a", "tools": [{"type": "\ud800"}]}]
    write(tmp_path / "a.jsonl", *bad, {"prompt": "good"})
    found = taken(tmp_path, time="at")
    assert (found.num_faults, prompts(found)) == (len(bad), ["good"])
    assert found.fault == f"{tmp_path / 'a.jsonl'} at byte 0", "without text of the line"


def test_matches_are_replaced_in_every_text_before_anything_is_kept(tmp_path: Path):
    content = [{"type": "text", "text": "I am a@b.cc"}]
    tools = [{"type": "function", "function": {"name": "f", "description": "of x@y.z"}}]
    asked = [{"role": "user", "content": content}]
    write(tmp_path / "a.jsonl", {"messages": asked, "tools": tools})
    write(tmp_path / "a.jsonl", {"prompt": "me@me.me and me"})
    found = taken(tmp_path, redact=(MAIL,))
    kept = json.dumps([one.row for one in found.chosen])
    assert "@" not in kept
    assert kept.count("[REDACTED]") == 3
    with pytest.raises(ConfigError, match="not a regular expression"):
        LogConfig(path="a", redact=("(",))


@pytest.mark.parametrize(
    ("arguments", "clean"),
    [
        ({"card": 4111111111111111, "n": 3}, {"card": "[REDACTED]", "n": 3}),
        ('{"card": 4111111111111111}', '{"card": "[REDACTED]"}'),
        ('{"to": ["me\\u0040me.me"]}', '{"to": ["[REDACTED]"]}'),
        ('{"name":  "\\u00fc"}', '{"name":  "\\u00fc"}'),  # as it was
    ],
)
def test_numbers_and_json_in_a_text_are_redacted(tmp_path: Path, arguments: Any, clean: Any):
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [*ASKED, {"role": "assistant", "content": "", "tool_calls": [call]}]
    write(tmp_path / "a.jsonl", {"messages": [*messages, {"role": "tool", "content": "done"}]})
    (found,) = taken(tmp_path, redact=(MAIL, r"\b\d{13,19}\b")).chosen
    kept = found.row["messages"][-2]["tool_calls"][0]["function"]["arguments"]
    assert kept == clean


def test_a_match_of_the_spelling_of_a_text_is_not_lost_where_it_is_written_anew(tmp_path: Path):
    write(tmp_path / "a.jsonl", {"prompt": '{"key":"secret","n":4111111111111111}'})
    (found,) = taken(tmp_path, redact=(r'"key":"\w*"', r"\d{13,19}")).chosen
    assert "secret" not in found.row["prompt"]
    assert "4111" not in found.row["prompt"]


def test_what_cannot_be_redacted_is_not_read(tmp_path: Path):
    bad = {"prompt": [7, 8]}, {"prompt": [[]]}, {"prompt": [[], [1]]}
    write(tmp_path / "a.jsonl", *bad, {"prompt": "a", "user": "me@me.me"})
    found = taken(tmp_path, redact=(MAIL,), slice="user")
    assert (found.num_faults, [one.slice for one in found.chosen]) == (3, ["[REDACTED]"])


def test_a_request_brings_no_template_of_its_own(tmp_path: Path):
    given = {"enable_thinking": False, "chat_template": "{{ 1 }}", "tokenize": 3}
    write(tmp_path / "a.jsonl", {"messages": ASKED, "chat_template_kwargs": given})
    (found,) = taken(tmp_path).chosen
    assert found.row["chat_template_kwargs"] == {"enable_thinking": False}


def test_slice_and_time_of_a_request(tmp_path: Path):
    log = tmp_path / "a.jsonl"
    write(log, {"prompt": "a", "user": {"tier": 3}, "at": "1970-01-01T00:01+00:00"})
    write(log, {"prompt": "b", "at": 7})
    found = taken(tmp_path, slice="user.tier", time="at").chosen
    assert [(one.slice, one.time) for one in found] == [("3", 60.0), ("", 7.0)]


def test_chosen_prompts_are_a_uniform_sample_of_the_different_ones(tmp_path: Path):
    """Of 10 prompts, one of them logged 50 times, 3 are chosen by each of 400 keys.

    Each is expected 120 times with a spread of 9; beyond 4.5 spreads: below 1e-4 for any of them.
    A reservoir over lines, without the digest, would nearly always have the frequent one.
    """
    rows = [{"prompt": f"p{min(number, 9)}"} for number in range(60)]
    write(tmp_path / "a.jsonl", *rows)
    config, counts = LogConfig(path=str(tmp_path / "a.jsonl")), Counter[str]()
    for key in range(400):
        counts.update(prompts(read(config, {}, 3, key=str(key), now=0.0)))
    assert len(counts) == 10
    assert all(abs(count - 120) < 4.5 * 9.2 for count in counts.values()), counts


def test_a_log_is_replayed_in_parts(tmp_path: Path):
    write(tmp_path / "a.jsonl", *[{"prompt": f"p{number}"} for number in range(10)])
    found, parts = None, []
    while (found := taken(tmp_path, found, most=4)).num_requests:
        parts.append(prompts(found))
    assert parts == [["p0", "p1", "p2", "p3"], ["p4", "p5", "p6", "p7"], ["p8", "p9"]]
