"""Open chat: every record becomes a message, and nothing is scored."""

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.data import CorpusConfig
from paceline.data.tokens import encode_prompt
from paceline.errors import PromptError, UsageError
from paceline.tasks import Chat
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


def test_a_message_has_the_tools_and_arguments_of_its_corpus(tmp_path: Path):
    tokenizer = tokenizer_of(next(family for family in CHAT_FAMILIES if family.name == "qwen3"))
    corpus = write(tmp_path / "a.jsonl", {"prompt": USER["content"]})
    arguments = {"enable_thinking": False}
    given = corpus.model_copy(update={"tools": [TOOL], "chat_template_kwargs": arguments})
    (example,) = Chat(corpus=given).examples("test", 1)
    assert encode_prompt(example.record, tokenizer) == tokenizer.apply_chat_template(
        [USER], tools=[TOOL], add_generation_prompt=True, return_dict=False, **arguments
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
    assert set(task.signatures()) == {"task_version", "corpus"}
    with pytest.raises(UsageError) as caught:
        task.score(task.examples("test", 1)[0], "an answer")
    assert str(caught.value) == (
        "the chat task has no metric; use questions, math or another task with reference answers"
    )
