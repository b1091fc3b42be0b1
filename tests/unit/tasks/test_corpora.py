"""Tasks of the user's own text: prompts or messages to be timed, pairs to be scored."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from paceline.data import CorpusConfig
from paceline.data.tokens import encode_prompt
from paceline.errors import PromptError, UsageError
from paceline.tasks import (
    Code,
    Pairs,
    PlainText,
    Questions,
    Split,
    Task,
    TaskExample,
    Translation,
)
from support.tasks import corpus as corpus_of
from support.tasks import pair, texts
from support.texts import CHAT_FAMILIES, TOOL, tokenizer_of

USER = {"role": "user", "content": "Why is the sky blue?"}
ANSWER = {"role": "assistant", "content": "Because."}


@pytest.fixture
def corpus(tmp_path: Path) -> CorpusConfig:
    return corpus_of(tmp_path / "test.jsonl", *map(pair, range(10)))


def test_pairs_carry_prompt_and_reference(corpus: CorpusConfig):
    examples = Pairs(corpus=corpus).examples("test", 10)
    assert sorted(texts(examples)) == sorted(f"Haus {n}" for n in range(10))
    for example in examples:
        assert example.reference == str(example.record.completion)
        assert example.reference.split()[-1] == texts([example])[0].split()[-1]


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
    corpus = corpus_of(tmp_path / "a.jsonl", {"messages": messages})
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
    corpus = corpus_of(tmp_path / "a.jsonl", pair(0), pair(1), row, pair(2))
    said = (
        "is an answer as tokens, but" if "completion" in row else "has no reference answer as text"
    )
    with pytest.raises(PromptError, match=rf"a\.jsonl line 3 {said}"):
        Pairs(corpus=corpus).examples("test", 1)


def test_answers_that_generate_data_wrote_are_references(tmp_path: Path):
    row = {"prompt": "hi", "prompt_tokens": [5], "completion": "yes", "completion_tokens": [6, 7]}
    (example,) = Pairs(corpus=corpus_of(tmp_path / "a.jsonl", row)).examples("test", 1)
    assert (example.record.text, example.reference) == ([5], "yes")


@pytest.mark.parametrize(
    ("metric", "answer", "score"),
    [
        ("exact_match", "the cat", 0),
        ("rouge2", "sat the cat", 1 / 2),
    ],
)
def test_the_metric_that_is_named_is_computed(
    corpus: CorpusConfig, metric: Any, answer: str, score: float
):
    task = Pairs(corpus=corpus, metric=metric)
    assert task.metric == metric
    example = TaskExample(task.examples("test", 1)[0].record, "the cat sat")
    assert task.score(example, answer) == pytest.approx(score)


def test_versions_are_those_of_the_metric_and_of_what_stands_in_the_corpus(tmp_path: Path):
    corpus = corpus_of(tmp_path / "a.jsonl", pair(0), pair(1))
    first = Pairs(corpus=corpus).versions()
    assert set(first) == {"corpus"} == set(PlainText(corpus=corpus).versions())
    assert set(Pairs(corpus=corpus, metric="chrf").versions()) == {"sacrebleu", "corpus"}
    assert Pairs(corpus=corpus).versions() == first
    assert Pairs(corpus=corpus_of(tmp_path / "a.jsonl", pair(0), pair(2))).versions() != first
    assert Pairs(corpus=CorpusConfig(path="some/dataset")).versions() == {}


def test_what_the_test_corpus_asks_is_left_out_of_training(corpus: CorpusConfig, tmp_path: Path):
    known = {"prompt": "Haus 3", "completion": " another answer"}
    train = corpus_of(tmp_path / "train.jsonl", pair(20), known, pair(21))
    task = Pairs(corpus=corpus, train_corpus=train)
    assert sorted(texts(task.examples("train", 2))) == ["Haus 20", "Haus 21"]
    with pytest.raises(
        UsageError, match=r"prompts of .*test\.jsonl, has 2 distinct examples, 3 were"
    ):
        task.examples("train", 3)


def test_without_a_training_corpus_there_is_nothing_to_train_on(corpus: CorpusConfig):
    given: tuple[tuple[Task, Split, str], ...] = (
        (Pairs(corpus=corpus), "train", "name a train_corpus$"),
        (PlainText(corpus=corpus), "train", "name a train_corpus$"),
        (Translation(corpus=corpus), "train", "^no training text besides .*; name a train_corpus$"),
        (Translation(corpus=corpus, num_shots=2), "test", "name a train_corpus"),
        (Code(), "train", "has no training problems"),
    )
    for task, split, said in given:
        with pytest.raises(UsageError, match=said):
            task.examples(split, 1)


def test_repeated_records_are_one_example(tmp_path: Path):
    corpus = corpus_of(tmp_path / "a.jsonl", pair(0), pair(0), pair(1))
    with pytest.raises(UsageError, match=r"a\.jsonl has 2 distinct examples, 3 were requested"):
        Pairs(corpus=corpus).examples("test", 3)


def test_a_seed_decides_the_order_and_the_order_of_the_file_does_not(
    corpus: CorpusConfig, tmp_path: Path
):
    backwards = corpus_of(tmp_path / "b.jsonl", *map(pair, reversed(range(10))))
    first = texts(Pairs(corpus=corpus).examples("test", 6, 1))
    assert texts(Pairs(corpus=backwards).examples("test", 6, 1)) == first
    assert texts(Pairs(corpus=corpus).examples("test", 3, 1)) == first[:3]
    assert texts(Pairs(corpus=corpus).examples("test", 6, 2)) != first


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ({"prompt": USER["content"]}, [USER]),
        ({"text": USER["content"]}, [USER]),
        ({"prompt": USER["content"], "completion": "Because."}, [USER, ANSWER]),
        ({"messages": [USER, ANSWER, USER]}, [USER, ANSWER, USER]),
    ],
)
def test_in_a_chat_a_record_is_a_message_of_the_user(
    tmp_path: Path, row: dict[str, Any], messages: list[Any]
):
    task = PlainText(corpus=corpus_of(tmp_path / "a.jsonl", row), chat=True)
    (example,) = task.examples("test", 1)
    assert example.record.kind == "chat"
    assert list(example.record.messages) == messages
    assert (example.record.text, example.record.completion, example.reference) == ("", None, "")


@pytest.mark.parametrize(
    ("task", "split"),
    [
        *((partial(PlainText, chat=True), split) for split in ("test", "train")),
        *((partial(Questions, chat=True), split) for split in ("test", "train")),
        (partial(Code, chat=True), "test"),
    ],
)
def test_a_message_has_the_tools_and_arguments_of_its_corpus(
    tmp_path: Path, task: Any, split: Split
):
    tokenizer = tokenizer_of(next(family for family in CHAT_FAMILIES if family.name == "qwen3"))
    row = {"prompt": USER["content"], "completion": "Because.", "test": "", "entry_point": "f"}
    row["test"] = "def check(f):\n    assert f(1)\n"
    other = corpus_of(tmp_path / "other.jsonl", row | {"prompt": "What is rain?"})
    arguments = {"enable_thinking": False}
    settings = {"tools": [TOOL], "chat_template_kwargs": arguments}
    given = corpus_of(tmp_path / "a.jsonl", row, **settings)
    corpora = {"corpus": given} if split == "test" else {"corpus": other, "train_corpus": given}
    (example,) = task(**corpora).examples(split, 1)
    asked = [message for message in example.record.messages if message["role"] == "user"]
    assert encode_prompt(example.record, tokenizer) == tokenizer.apply_chat_template(
        asked, tools=[TOOL], add_generation_prompt=True, return_dict=False, **arguments
    )


def test_what_plain_text_cannot_do_is_refused(corpus: CorpusConfig, tmp_path: Path):
    task = PlainText(corpus=corpus)
    with pytest.raises(UsageError, match="the text task has no metric"):
        task.score(task.examples("test", 1)[0], "an answer")
    tokens = PlainText(corpus=corpus_of(tmp_path / "a.jsonl", {"prompt": [1, 2]}), chat=True)
    with pytest.raises(PromptError, match="line 1 has tokens; wanted a text"):
        tokens.examples("test", 1)
