"""Word problems: numbers compared digit by digit, and generated ones by reasoning_gym's scorer."""

import json
import random
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from paceline.data import CorpusConfig
from paceline.errors import PromptError
from paceline.tasks import GSMSymbolic, Math, TaskExample
from paceline.tasks.math_problems import final_number

ROWS = [
    {"question": "How many apples are 2 and 3?", "answer": "2 + 3 = <<2+3=5>>5\n#### 5"},
    {"question": "What do 1,000 cars cost?", "answer": "1000 * 3\n#### 3,000"},
]


def write(path: Path, rows: list[dict[str, Any]]) -> CorpusConfig:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return CorpusConfig(path=str(path), prompt_field="question", completion_field="answer")


@pytest.fixture
def examples(tmp_path: Path) -> list[TaskExample]:
    found = Math(corpus=write(tmp_path / "a.jsonl", ROWS)).examples("test", 2)
    return sorted(found, key=lambda example: len(example.reference))


def test_a_row_of_gsm8k_is_a_question_with_a_worked_answer(examples: list[TaskExample]):
    assert [example.reference for example in examples] == ["5", "3000"]
    record = examples[0].record
    assert record.text == "Question: How many apples are 2 and 3?\nAnswer:"
    assert record.completion == " 2 + 3 = <<2+3=5>>5\n#### 5"


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        (" 2 + 3 = 5\n#### 5", 1.0),
        ("#### 5\n\nQuestion: 7 and 8?\nAnswer: #### 15", 1.0),  # as GSM8K's own evaluation
        ("The answer is $5.", 1.0),
        ("5.0", 0.0),
        ("-5", 0.0),
        ("55", 0.0),
        ("five", 0.0),
        ("", 0.0),
    ],
)
def test_an_answer_is_right_if_its_final_number_is(
    examples: list[TaskExample], tmp_path: Path, answer: str, score: float
):
    task = Math(corpus=write(tmp_path / "b.jsonl", ROWS))
    assert task.metric == "accuracy"
    assert task.score(examples[0], answer) == score


def test_after_few_shot_examples_the_next_question_does_not_count(
    examples: list[TaskExample], tmp_path: Path
):
    corpus = write(tmp_path / "b.jsonl", ROWS)
    train = write(tmp_path / "c.jsonl", [{"question": "1 + 1?", "answer": 2}])
    task = Math(corpus=corpus, train_corpus=train, num_shots=1)
    assert task.score(examples[0], " #### 5\n\nQuestion: 7 and 8?\nAnswer: #### 15") == 1.0
    shown = str(task.examples("test", 1)[0].record.text)
    assert shown.startswith("Question: 1 + 1?\nAnswer: 2\n\nQuestion: ")


@pytest.mark.parametrize(
    ("value", "text"), [(12, "12"), (145.0, "145"), (-2.5, "-2.5"), (1e-05, "0.00001")]
)
def test_a_reference_may_be_a_number(value: float, text: str, tmp_path: Path):
    rows = [{"question": "a?", "answer": value}]
    task = Math(corpus=write(tmp_path / "a.jsonl", rows))
    (example,) = task.examples("test", 1)
    assert (example.reference, example.record.completion) == (text, f" {text}")
    assert task.score(example, f"The answer is {text}.") == 1.0


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("twelve", "has no number in column answer; wanted an answer that ends in one, such as "),
        ("12 ####", "has no number in column answer; wanted an answer that ends in one, such as "),
        (None, "has no reference answer as text in column answer; fill it or leave the row out"),
        (True, "has no reference answer as text in column answer; fill it or leave the row out"),
        ("", "has an empty answer; fill it or leave the line out"),
    ],
)
def test_a_reference_without_a_number_is_one_line(tmp_path: Path, answer: Any, message: str):
    corpus = write(tmp_path / "a.jsonl", [*ROWS, {"question": "a?", "answer": answer}])
    with pytest.raises(PromptError) as caught:
        Math(corpus=corpus).examples("test", 1)
    assert f"a.jsonl line 3 {message}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_generated_splits_are_disjoint_distinct_and_prefixes_of_longer_ones():
    task = GSMSymbolic()
    for seed in (0, 1):
        test = [str(e.record.text) for e in task.examples("test", 60, seed)]
        train = [str(e.record.text) for e in task.examples("train", 400, seed)]
        assert len(set(test)) == 60
        assert len(set(train)) == 400
        assert not set(test) & {str(e.record.text) for e in task.examples("train", 400, 1 - seed)}
        assert not set(test) & set(train)
        assert test[:20] == [str(e.record.text) for e in task.examples("test", 20, seed)]
    assert task.examples("test", 5, 0) != task.examples("test", 5, 1)


def test_generated_problems_are_scored_by_reasoning_gym():
    import reasoning_gym  # not by every test that collects these

    data = reasoning_gym.create_dataset("gsm_symbolic", seed=5, size=30)
    task, rng = GSMSymbolic(), random.Random(1)
    record = task.examples("test", 1)[0].record
    for item in islice(data, 30):
        number = int(item["answer"]) if item["answer"].isdigit() else 0
        for tried in (item["answer"], f"{number}.0", str(rng.randrange(100)), str(number + 1)):
            wanted = float(data.score_answer(tried, item) == 1.0)
            example = TaskExample(record, item["answer"])
            assert task.score(example, f"so 3 * 4 = 12\n#### {tried}") == wanted
    assert task.score(TaskExample(record, "12"), "") == 0.0


def test_every_generated_reference_gets_full_marks_with_its_worked_answer():
    task = GSMSymbolic()
    for example in task.examples("test", 80, seed=3):
        assert task.score(example, str(example.record.completion)) == 1.0
        assert final_number(str(example.record.completion)) == example.reference


def test_a_generated_chat_asks_and_answers():
    plain, chat = (
        GSMSymbolic().examples("test", 1)[0],
        GSMSymbolic(chat=True).examples("test", 1)[0],
    )
    question, answer = (message["content"] for message in chat.record.messages)
    assert plain.record.text == f"Question: {question}\nAnswer:"
    assert plain.record.completion == f" {answer}"
    assert set(GSMSymbolic().signatures()) == {"task_version", "reasoning-gym"}
