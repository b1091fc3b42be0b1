"""Prompts and trained parts of chats."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from chat_families import FAMILIES, FAMILY_NAMES, TOOL, TOOLS, WEATHER, Family, tokenizer_of
from paceline.data.examples import Example, Lengths, build_examples
from paceline.data.prompts import Record, read_records


def read(path: Path, row: dict[str, Any]) -> Record:
    path.write_text(json.dumps(row) + "\n")
    (record,) = read_records(path)
    return record


def build(record: Record, tokenizer: Any, stops: str = "") -> list[Example]:
    return build_examples(
        [record],
        tokenizer,
        Lengths(1000, 1000),
        eos_token_id=tokenizer.eos_token_id,
        eos_token_ids=tokenizer.convert_tokens_to_ids(stops.split()),
    )


def marked(example: Example, tokenizer: Any) -> str:
    """The text of an example with marks around what is trained."""
    assert example.trained_from is not None
    parts = (
        list(example.tokens[: example.trained_from]),
        list(example.tokens[example.trained_from :]),
    )
    return "{}«{}»".format(*(tokenizer.decode(part) for part in parts))


def turns_of(expected: str | tuple[str, ...]) -> list[str]:
    """A text a turn, of which the last part is marked."""
    if isinstance(expected, tuple):
        return list(expected)
    ends = [match.end() for match in re.finditer("»", expected)]
    return [re.sub("«(.*?)»(?=.)", r"\1", expected[:end], flags=re.DOTALL) for end in ends]


@pytest.mark.parametrize("family", FAMILIES, ids=FAMILY_NAMES)
def test_every_answer_is_trained_behind_its_prompt_up_to_the_end_of_the_turn(
    tmp_path: Path, family: Family
):
    tokenizer = tokenizer_of(family)
    row = {"messages": family.messages, "chat_template_kwargs": dict(family.arguments)}
    examples = build(read(tmp_path / "a.jsonl", row), tokenizer, family.stops)
    assert [marked(example, tokenizer) for example in examples] == turns_of(family.talk)


@pytest.mark.parametrize("family", FAMILIES, ids=FAMILY_NAMES)
def test_prompts_are_what_transformers_makes_of_the_messages_before(tmp_path: Path, family: Family):
    tokenizer = tokenizer_of(family)
    row = {"messages": family.messages, "chat_template_kwargs": dict(family.arguments)}
    examples = build(read(tmp_path / "a.jsonl", row), tokenizer, family.stops)
    for index, example in zip((2, 4), examples, strict=True):
        prompt = tokenizer.apply_chat_template(
            family.messages[:index],
            add_generation_prompt=True,
            return_dict=False,
            **family.arguments,
        )
        assert example.prompt == prompt
        whole = tokenizer.apply_chat_template(
            family.messages[: index + 1], return_dict=False, **family.arguments
        )
        if whole[: len(prompt)] == prompt:
            assert list(example.tokens) == whole[: len(example.tokens)]


@pytest.mark.parametrize("family", [f for f in FAMILIES if f.weather], ids=lambda f: f.name)
@pytest.mark.parametrize("as_text", [False, True])
def test_tools_and_calls_are_rendered_as_they_are_served(
    tmp_path: Path, family: Family, *, as_text: bool
):
    tokenizer = tokenizer_of(family)
    row = {
        "messages": WEATHER,
        "tools": TOOLS if as_text else [TOOL],
        "chat_template_kwargs": dict(family.arguments),
    }
    examples = build(read(tmp_path / "a.jsonl", row), tokenizer, family.stops)
    assert [marked(example, tokenizer) for example in examples] == turns_of(family.weather)
