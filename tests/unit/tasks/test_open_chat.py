"""Open chat: every record becomes a message, and nothing is scored."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from paceline.data import CorpusConfig
from paceline.data.tokens import encode_prompt
from paceline.errors import PromptError, UsageError
from paceline.tasks import Chat, Code, Questions, Split
from support.texts import CHAT_FAMILIES, TOOL, tokenizer_of

USER = {"role": "user", "content": "Why is the sky blue?"}
ANSWER = {"role": "assistant", "content": "Because."}
SYSTEM = {"role": "system", "content": "Be brief."}


def write(path: Path, row: dict[str, Any]) -> CorpusConfig:
    path.write_text(json.dumps(row) + "\n")
    return CorpusConfig(path=str(path))


@pytest.mark.parametrize(
    ("row", "settings", "messages"),
    [
        ({"prompt": USER["content"]}, {}, [USER]),
        ({"text": USER["content"]}, {}, [USER]),
        ({"prompt": USER["content"], "completion": "Because."}, {}, [USER, ANSWER]),
        ({"prompt": USER["content"]}, {"system": "Be brief."}, [SYSTEM, USER]),
        ({"messages": [USER, ANSWER, USER]}, {"system": "no"}, [USER, ANSWER, USER]),
    ],
)
def test_a_record_is_a_message_of_the_user(
    tmp_path: Path, row: dict[str, Any], settings: dict[str, Any], messages: list[Any]
):
    task = Chat(corpus=write(tmp_path / "a.jsonl", row), **settings)
    (example,) = task.examples("test", 1)
    assert example.record.kind == "chat"
    assert list(example.record.messages) == messages
    assert (example.record.text, example.record.completion, example.reference) == ("", None, "")
    assert example.record.where.endswith("a.jsonl line 1")


@pytest.mark.parametrize("task", [Chat, partial(Questions, chat=True), partial(Code, chat=True)])
@pytest.mark.parametrize("split", ["test", "train"])
def test_a_message_has_the_tools_and_arguments_of_its_corpus(
    tmp_path: Path, task: Any, split: Split
):
    tokenizer = tokenizer_of(next(family for family in CHAT_FAMILIES if family.name == "qwen3"))
    code = {"test": "def check(f):\n    assert f(1)\n", "entry_point": "f"}
    row = {"prompt": USER["content"], "completion": "Because.", "canonical_solution": "x", **code}
    other = write(tmp_path / "other.jsonl", row | {"prompt": "What is rain?", "entry_point": "g"})
    arguments = {"enable_thinking": False}
    given = write(tmp_path / "a.jsonl", row).model_copy(
        update={"tools": [TOOL], "chat_template_kwargs": arguments}
    )
    corpora = {"corpus": given} if split == "test" else {"corpus": other, "train_corpus": given}
    (example,) = task(**corpora).examples(split, 1)
    asked = [message for message in example.record.messages if message["role"] == "user"]
    assert encode_prompt(example.record, tokenizer) == tokenizer.apply_chat_template(
        asked, tools=[TOOL], add_generation_prompt=True, return_dict=False, **arguments
    )


def test_tokens_cannot_be_a_message(tmp_path: Path):
    task = Chat(corpus=write(tmp_path / "a.jsonl", {"prompt": [1, 2]}))
    with pytest.raises(
        PromptError, match=r"line 1 has tokens; wanted a text to send as a message$"
    ):
        task.examples("test", 1)


def test_a_chat_is_not_scored(tmp_path: Path):
    task = Chat(corpus=write(tmp_path / "a.jsonl", {"prompt": "hello"}))
    assert task.metric is None
    assert task.corpus_scores([], []) == {}
    assert set(task.versions()) == {"task_version", "corpus"}
    with pytest.raises(UsageError) as caught:
        task.score(task.examples("test", 1)[0], "an answer")
    assert str(caught.value) == (
        "the chat task has no metric; use questions, math or another task with reference answers"
    )
