"""Tasks of the user's own text: prompts to be timed, pairs to be scored."""

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.data import CorpusConfig
from paceline.errors import PromptError, UsageError
from paceline.tasks import Pairs, PlainText, TaskExample


def write(path: Path, *rows: dict[str, Any]) -> CorpusConfig:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return CorpusConfig(path=str(path))


def pair(number: int) -> dict[str, str]:
    return {"prompt": f"question {number}", "completion": f" answer {number}"}


@pytest.fixture
def corpus(tmp_path: Path) -> CorpusConfig:
    return write(tmp_path / "test.jsonl", *map(pair, range(10)))


def prompts(examples: list[TaskExample]) -> list[str]:
    return [str(example.record.text) for example in examples]


def test_pairs_carry_prompt_and_reference(corpus: CorpusConfig):
    examples = Pairs(corpus=corpus).examples("test", 10)
    assert sorted(prompts(examples)) == sorted(f"question {n}" for n in range(10))
    for example in examples:
        assert example.reference == str(example.record.completion)
        assert example.reference.split()[-1] == prompts([example])[0].split()[-1]


def test_the_last_answer_of_a_chat_is_its_reference(tmp_path: Path):
    messages = [
        {"role": role, "content": content}
        for role, content in [
            ("user", "one?"),
            ("assistant", "yes"),
            ("user", "two?"),
            ("assistant", "no"),
        ]
    ]
    corpus = write(tmp_path / "a.jsonl", {"messages": messages})
    example = Pairs(corpus=corpus).examples("test", 1)[0]
    assert example.reference == "no"
    assert list(example.record.messages) == messages


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "no answer"},
        {"prompt": "tokens", "completion": [1, 2]},
        {"text": "a document"},
        {"messages": [{"role": "user", "content": "hello"}]},
        {"messages": [{"role": "assistant", "content": "x"}, {"role": "user", "content": "y"}]},
    ],
)
def test_a_record_without_an_answer_is_named_by_its_line_even_if_it_is_not_chosen(
    tmp_path: Path, row: dict[str, Any]
):
    corpus = write(tmp_path / "a.jsonl", pair(0), pair(1), row, pair(2))
    with pytest.raises(PromptError) as caught:
        Pairs(corpus=corpus).examples("test", 1)
    assert str(caught.value).endswith(
        "a.jsonl line 3 has no reference answer as text; give it a completion, or a last "
        "message by the assistant"
    )


@pytest.mark.parametrize(
    ("metric", "answer", "score"),
    [
        ("exact_match", "the cat sat ", 1),
        ("exact_match", "the cat", 0),
        ("rouge1", "sat the cat", 1),
        ("rouge2", "sat the cat", 1 / 2),
        ("rougeL", "sat the cat", 2 / 3),
        ("chrf", "the cat sat", 1),
    ],
)
def test_the_metric_that_is_named_is_computed(
    corpus: CorpusConfig, metric: Any, answer: str, score: float
):
    task = Pairs(corpus=corpus, metric=metric)
    assert task.metric == metric
    example = TaskExample(task.examples("test", 1)[0].record, "the cat sat")
    assert task.score(example, answer) == pytest.approx(score)


def test_an_answer_is_judged_whole_unless_only_its_first_line_is_wanted(corpus: CorpusConfig):
    answer = "\n answer \nand more"
    for first_line_only, score in ((False, 0.0), (True, 1.0)):
        task = Pairs(corpus=corpus, first_line_only=first_line_only)
        example = TaskExample(task.examples("test", 1)[0].record, " answer")
        assert task.score(example, answer) == score


def test_versions_are_those_of_the_metric_and_of_what_stands_in_the_corpus(tmp_path: Path):
    corpus = write(tmp_path / "a.jsonl", pair(0), pair(1))
    first = Pairs(corpus=corpus).versions()
    assert set(first) == {"corpus"} == set(PlainText(corpus=corpus).versions())
    assert set(Pairs(corpus=corpus, metric="chrf").versions()) == {"sacrebleu", "corpus"}
    assert Pairs(corpus=corpus).versions() == first
    assert Pairs(corpus=write(tmp_path / "a.jsonl", pair(0), pair(2))).versions() != first
    assert Pairs(corpus=CorpusConfig(path="some/dataset")).versions() == {}


def test_what_the_test_corpus_asks_is_left_out_of_training(corpus: CorpusConfig, tmp_path: Path):
    known = {"prompt": "question 3", "completion": " another answer"}
    train = write(tmp_path / "train.jsonl", pair(20), known, pair(21))
    task = Pairs(corpus=corpus, train_corpus=train)
    assert sorted(prompts(task.examples("train", 2))) == ["question 20", "question 21"]
    with pytest.raises(
        UsageError, match=r"prompts of .*test\.jsonl, has 2 distinct examples, 3 were"
    ):
        task.examples("train", 3)


def test_a_chat_that_is_asked_in_the_test_corpus_is_left_out_whatever_its_answer(tmp_path: Path):
    def chat(question: str, answer: str) -> dict[str, Any]:
        roles = (("user", question), ("assistant", answer))
        return {"messages": [{"role": role, "content": content} for role, content in roles]}

    test = write(tmp_path / "test.jsonl", chat("one", "yes"))
    train = write(tmp_path / "train.jsonl", chat("one", "no"), chat("two", "yes"))
    task = Pairs(corpus=test, train_corpus=train)
    assert task.examples("train", 1)[0].record.messages[0]["content"] == "two"


def test_without_a_training_corpus_there_is_nothing_to_train_on(corpus: CorpusConfig):
    for task in (Pairs(corpus=corpus), PlainText(corpus=corpus)):
        with pytest.raises(UsageError, match=r"name a train_corpus$"):
            task.examples("train", 1)


def test_repeated_records_are_one_example(tmp_path: Path):
    corpus = write(tmp_path / "a.jsonl", pair(0), pair(0), pair(1))
    with pytest.raises(UsageError) as caught:
        Pairs(corpus=corpus).examples("test", 3)
    assert str(caught.value).endswith(
        "a.jsonl has 2 distinct examples, 3 were requested; request fewer or give more text"
    )


def test_a_seed_decides_the_order_and_the_order_of_the_file_does_not(
    corpus: CorpusConfig, tmp_path: Path
):
    backwards = write(tmp_path / "b.jsonl", *map(pair, reversed(range(10))))
    first = prompts(Pairs(corpus=corpus).examples("test", 6, 1))
    assert prompts(Pairs(corpus=backwards).examples("test", 6, 1)) == first
    assert prompts(Pairs(corpus=corpus).examples("test", 3, 1)) == first[:3]
    assert prompts(Pairs(corpus=corpus).examples("test", 6, 2)) != first


@pytest.mark.parametrize(
    "row",
    [
        {"text": "a document"},
        {"tokens": [1, 2, 3]},
        {"prompt": "a prompt"},
        {"prompt": "a prompt", "completion": "answered"},
        {"messages": [{"role": "user", "content": "hello"}]},
    ],
)
def test_plain_text_takes_every_kind_of_record_as_it_is(tmp_path: Path, row: dict[str, Any]):
    task = PlainText(corpus=write(tmp_path / "a.jsonl", row))
    example = task.examples("test", 1)[0]
    assert example.reference == ""
    assert example.record.where.endswith("a.jsonl line 1")
    assert task.metric is None


def test_plain_text_cannot_be_scored(corpus: CorpusConfig):
    task = PlainText(corpus=corpus)
    with pytest.raises(UsageError) as caught:
        task.score(task.examples("test", 1)[0], "an answer")
    assert str(caught.value) == (
        "the text task has no metric; use one that has, such as arithmetic or docstrings, or "
        "give prompts with completions as task pairs"
    )
