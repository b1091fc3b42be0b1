"""Rows of a data set become prompts: templates, few-shot examples, chats, and where answers end."""

from pathlib import Path
from typing import Any

import pytest

from paceline.data import CorpusConfig
from paceline.errors import ConfigError, PromptError, UsageError
from paceline.tasks import (
    Questions,
    Summarization,
    Translation,
    build_task,
)
from support.tasks import corpus as corpus_of
from support.tasks import pair, texts


@pytest.fixture
def test_rows(tmp_path: Path) -> CorpusConfig:
    return corpus_of(tmp_path / "test.jsonl", *map(pair, range(6)))


@pytest.fixture
def training_rows(tmp_path: Path) -> CorpusConfig:
    return corpus_of(tmp_path / "train.jsonl", *map(pair, range(4, 14)))


def test_a_row_is_its_source_in_the_template_and_its_reference(test_rows: CorpusConfig):
    task = Translation(corpus=test_rows, prompt="translate German to English: {source} =")
    examples = task.examples("test", 6)
    assert sorted(texts(examples)) == [f"translate German to English: Haus {n} =" for n in range(6)]
    for example in examples:
        number = texts([example])[0].split()[-2]
        assert (example.reference, example.record.completion) == (
            f"house {number}",
            f" house {number}",
        )
        assert example.alternatives == ()


def test_nested_columns_and_several_columns_fill_a_template(tmp_path: Path):
    row = {"id": 1, "translation": {"de": "Guten Tag {sic}", "en": "Good day"}, "topic": "hello"}
    corpus = corpus_of(
        tmp_path / "a.jsonl",
        row,
        prompt_field="translation.de",
        completion_field="translation.en",
    )
    prompt = "{topic} {translation.de} {} {2}: {source}"
    (example,) = Translation(corpus=corpus, prompt=prompt, separator="").examples("test", 1)
    assert texts([example]) == ["hello Guten Tag {sic} {} {2}: Guten Tag {sic}"]
    assert example.record.completion == example.reference == "Good day"


def test_few_shot_examples_come_before_every_prompt_and_are_never_tested(
    test_rows: CorpusConfig, training_rows: CorpusConfig
):
    task = Translation(corpus=test_rows, train_corpus=training_rows, num_shots=2)
    first = {text.rpartition("\n\n")[0] for text in texts(task.examples("test", 6, seed=1))}
    (shown,) = first
    lines = shown.split("\n\n")
    assert len(lines) == 2
    numbers = [int(line.split()[-1]) for line in lines]
    assert lines == [f"Haus {n} house {n}" for n in numbers]
    assert set(numbers) <= set(range(6, 14))
    assert texts(task.examples("test", 3, seed=1)) == texts(task.examples("test", 6, seed=1))[:3]
    assert any(shown not in texts(task.examples("test", 1, seed=s))[0] for s in range(2, 6))


def test_training_examples_repeat_neither_the_shots_nor_the_test(
    test_rows: CorpusConfig, training_rows: CorpusConfig
):
    task = Translation(corpus=test_rows, train_corpus=training_rows, num_shots=2)
    examples = task.examples("train", 6, seed=1)
    shots = texts(examples)[0].split("\n\n")[:2]
    used = [int(shot.split()[-1]) for shot in shots]
    asked = [int(text.split()[-1]) for text in texts(examples)]
    assert sorted(used + asked) == list(range(6, 14))
    with pytest.raises(UsageError, match="has 8 distinct examples, 9 were requested"):
        task.examples("train", 7)


def test_a_repeated_test_row_is_an_example_each_time(tmp_path: Path):
    rows = [pair(1), pair(2), pair(1), pair(1)]
    task = Translation(corpus=corpus_of(tmp_path / "test.jsonl", *rows))
    assert sorted(texts(task.examples("test", 4))) == ["Haus 1"] * 3 + ["Haus 2"]
    with pytest.raises(UsageError, match="has 4 examples, 5 were requested; request fewer or"):
        task.examples("test", 5)


def test_a_chat_shows_the_shots_as_turns(test_rows: CorpusConfig, training_rows: CorpusConfig):
    task = Translation(corpus=test_rows, train_corpus=training_rows, num_shots=1, chat=True)
    (example,) = task.examples("test", 1)
    roles = [message["role"] for message in example.record.messages]
    contents = [message["content"] for message in example.record.messages]
    assert roles == ["user", "assistant"] * 2
    assert contents[1] == contents[0].replace("Haus", "house")
    assert contents[3] == contents[2].replace("Haus", "house") == example.reference


@pytest.mark.parametrize(
    ("settings", "answer", "scored"),
    [
        ({}, " one\n\ntwo \n", "one\n\ntwo"),
        ({"num_shots": 1}, "\n one \n\nHaus 3", "one"),
        ({"num_shots": 1, "chat": True}, "one\n\ntwo", "one\n\ntwo"),
        ({"stop": ["\n", "."]}, "\none. two\nthree", "one"),
        ({"stop": ["one"]}, "one", ""),
    ],
)
def test_an_answer_ends_at_the_first_stop(
    test_rows: CorpusConfig,
    training_rows: CorpusConfig,
    settings: dict[str, Any],
    answer: str,
    scored: str,
):
    task = Translation(corpus=test_rows, train_corpus=training_rows, **settings)
    assert task.cut(answer) == scored


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "x"}, "line 2 has no column completion; its columns are prompt"),
        ({"completion": "x"}, "line 2 has no column prompt; its columns are completion"),
        (
            {"prompt": "x", "completion": None},
            "line 2 has no reference answer as text in column completion",
        ),
        (
            {"prompt": "x", "completion": " "},
            "line 2 has an empty completion",
        ),
        (
            {"prompt": "\n", "completion": "x"},
            "line 2 has an empty prompt",
        ),
        (
            {"prompt": [1, 2], "completion": "x"},
            "line 2 has a list in column prompt",
        ),
    ],
)
def test_a_row_that_cannot_be_used_is_one_line_that_names_it(
    tmp_path: Path, row: dict[str, Any], message: str
):
    corpus = corpus_of(tmp_path / "a.jsonl", pair(0), row, pair(1))
    for kind in (Translation, Summarization, Questions):
        with pytest.raises(PromptError, match=f"a.jsonl {message}"):
            kind(corpus=corpus).examples("test", 1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"prompt": "translate"},
            "prompt 'translate' shows no column",
        ),
        ({"stop": [""]}, "at least 1 character"),
        ({"num_shots": -1}, "greater than or equal to 0"),
    ],
)
def test_settings_that_do_not_fit_together_are_one_line(
    test_rows: CorpusConfig, settings: dict[str, Any], message: str
):
    with pytest.raises(ConfigError) as caught:
        build_task({"task": "translation", "corpus": test_rows.path, **settings})
    assert message in str(caught.value)


def test_versions_follow_the_task_and_what_is_in_its_data(
    test_rows: CorpusConfig, training_rows: CorpusConfig, monkeypatch: pytest.MonkeyPatch
):
    task = Questions(corpus=test_rows, train_corpus=training_rows)
    first = task.versions()
    assert set(first) == {"task_version", "corpus", "match"}
    assert first["task_version"] == "2"
    shown = task.model_copy(update={"num_shots": 1}).versions()
    assert set(shown) == {"task_version", "corpus", "train_corpus", "match"}
    assert shown["train_corpus"] != shown["corpus"] == first["corpus"]
    corpus_of(Path(test_rows.path), *map(pair, range(5)))
    assert task.versions()["corpus"] != first["corpus"]
    monkeypatch.setattr(Questions, "version", 3)
    assert task.versions()["task_version"] == "3"
