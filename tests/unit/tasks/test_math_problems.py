"""Numbers compared digit by digit; generated sums, whose splits never meet."""

import hashlib
import itertools
import re
from pathlib import Path
from typing import Any

import pytest

from paceline.data import CorpusConfig
from paceline.errors import PromptError, UsageError
from paceline.tasks import Arithmetic, Math, TaskExample
from paceline.tasks.math_problems import final_number, work_out
from support.tasks import corpus
from support.tasks import example as example_of

ROWS = [
    {"question": "How many apples are 2 and 3?", "answer": "2 + 3 = <<2+3=5>>5\n#### 5"},
    {"question": "What do 1,000 cars cost?", "answer": "1000 * 3\n#### 3,000"},
]


def write(path: Path, rows: list[dict[str, Any]]) -> CorpusConfig:
    return corpus(path, *rows, prompt_field="question", completion_field="answer")


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
    train = write(tmp_path / "c.jsonl", [{"question": "1 + 1?", "answer": 2}])
    test = write(tmp_path / "b.jsonl", ROWS)
    task = Math(corpus=test, train_corpus=train, num_shots=1)
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
        ("twelve", "has no number in column answer"),
        ("12 ####", "has no number in column answer"),
        (None, "has no reference answer"),
        (True, "has no reference answer"),
        ("", "has an empty answer"),
    ],
)
def test_a_reference_without_a_number_is_one_line(tmp_path: Path, answer: Any, message: str):
    data = write(tmp_path / "a.jsonl", [*ROWS, {"question": "a?", "answer": answer}])
    with pytest.raises(PromptError) as caught:
        Math(corpus=data).examples("test", 1)
    assert f"a.jsonl line 3 {message}" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("5 + 6 = 11\n#### 11", "11"),
        ("#### 1,234\n\nQuestion: another?\n#### 3", "1234"),
        ("#### $1,234.50.", "1234.50"),
        ("#### -7", "-7"),
        ("#### -$7", "-7"),
        ("#### 0.5", "0.5"),
        ("#### 10,250,000", "10250000"),
        ("#### Step 1: add\n3 + 4 = 7\n#### 7", "7"),
        ("####42 apples, not 43", "42"),
        ("The answer is 42.", "42"),
        ("It costs $2,000.", "2000"),
        ("first 1, then 2", "2"),
        ("10-5", "5"),
        ("x = -5", "-5"),
        ("(3)-4", "4"),
        ("half is .5", ".5"),
        ("1. 2. 3.", "3"),
        ("12 #### none", None),
        ("#### Step 1: add\n3 + 4 = 7", "7"),
        ("##### Step 1: 3\n##### Answer: **7**", "7"),
        ("It is 1{,}234", "1234"),
        ("x = \N{MINUS SIGN}5", "-5"),
        ("no number", None),
        ("", None),
    ],
)
def test_the_final_number_is_read(text: str, number: str | None):
    assert final_number(text) == number


TASK = Arithmetic()
# Small enough to list: 200 expressions of two digits, 4,000 of three.
SMALL = Arithmetic(min_terms=2, max_terms=3, max_digits=1)


def whole(example: TaskExample) -> str:
    assert isinstance(example.record.text, str)
    assert isinstance(example.record.completion, str)
    return example.record.text + example.record.completion


def expressions(examples: list[TaskExample]) -> list[str]:
    return [whole(example).partition(" =")[0] for example in examples]


def held_out(expression: str) -> bool:
    return int(hashlib.sha256(expression.encode()).hexdigest(), 16) < 2**256 // 10


def all_small() -> list[str]:
    return [
        "".join(text)
        for terms in (2, 3)
        for text in itertools.product(
            "0123456789", *[[f" {sign} {n}" for sign in "+-" for n in range(10)]] * (terms - 1)
        )
    ]


@pytest.mark.parametrize(
    ("expression", "sides"),
    [
        ("4 - 3 + 12", ["1 + 12", "13"]),
        ("5 - 8 + 12 - 3", ["-3 + 12 - 3", "9 - 3", "6"]),
        ("1 - 2 - 3", ["-1 - 3", "-4"]),
        ("7 + 8", ["15"]),
    ],
)
def test_an_expression_is_reduced_one_operation_at_a_time(expression: str, sides: list[str]):
    assert work_out(expression) == sides


@pytest.mark.parametrize("split", ["train", "test"])
def test_all_sides_of_a_worked_answer_are_equal_and_each_has_one_term_less(split):
    for example in TASK.examples(split, 300):
        line = whole(example)
        number, sign = r"-?\d+", r" [+-] "
        assert re.fullmatch(rf"\d+(?:{sign}\d+)+(?: = {number}(?:{sign}\d+)*)+", line), line
        sides = line.split(" = ")
        assert {eval(side) for side in sides} == {int(example.reference)}
        terms = [len(side.split()) // 2 + 1 for side in sides]
        assert terms == list(range(terms[0], 0, -1))


def test_the_prompt_ends_where_the_answer_begins():
    example = TASK.examples("test", 1)[0]
    assert str(example.record.text).endswith(" =")
    assert str(example.record.completion).startswith(" ")
    assert example.record.kind == "prompt"


def test_every_worked_answer_is_right_and_with_any_digit_of_its_result_changed_wrong():
    for example in TASK.examples("test", 100):
        answer = str(example.record.completion)
        assert TASK.score(example, answer) == 1.0
        result = answer.rindex("=") + 1
        for place in (n for n in range(result, len(answer)) if answer[n].isdigit()):
            wrong = str((int(answer[place]) + 1) % 10)
            assert TASK.score(example, answer[:place] + wrong + answer[place + 1 :]) == 0.0


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        (" 13", 1.0),
        ("13", 1.0),
        (" 1 + 12 = 13\n5 + 5 = 10", 1.0),
        (" 2 + 12 = 13", 1.0),  # only the result is judged
        (" 1 + 12 = 13.0", 1.0),  # as the library sees numbers
        (" 1 + 12 = 14", 0.0),
        (" 1 + 12 = -13", 0.0),
        (" 1 + 12 = 130", 0.0),
        (" 1 + 12 = 13 = 14", 0.0),
        (" the sum is 13", 0.0),  # the library would give it some marks
        (" 1 + 12 =", 0.0),
        (" 1 + 12", 0.0),
        ("\n13", 0.0),
        ("", 0.0),
    ],
)
def test_what_stands_after_the_last_equals_sign_of_the_first_line_is_judged(
    answer: str, score: float
):
    assert TASK.score(example_of("13", text="4 - 3 + 12 ="), answer) == score


@pytest.mark.slow
def test_the_test_split_is_held_out_and_half_of_it_can_be_requested():
    wanted = {expression for expression in all_small() if held_out(expression)}
    examples = expressions(SMALL.examples("test", 210))
    assert len(set(examples)) == 210
    assert set(examples) < wanted
    with pytest.raises(UsageError, match=r"arithmetic has 210 test examples.*, 211 were requested"):
        SMALL.examples("test", 211)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_nothing_that_is_written_out_in_training_is_held_out(seed: int):
    tested = {expression for expression in all_small() if held_out(expression)}
    for example in SMALL.examples("train", 1000, seed):
        assert not tested.intersection(whole(example).split(" = "))


def test_one_seed_gives_the_same_examples_and_fewer_are_the_first_of_more():
    for split in ("train", "test"):
        assert TASK.examples(split, 50, 7) == Arithmetic().examples(split, 50, 7)
        assert TASK.examples(split, 20, 7) == TASK.examples(split, 50, 7)[:20]


def test_terms_and_digits_are_within_their_limits():
    task = Arithmetic(min_terms=2, max_terms=3, max_digits=3)
    for expression in expressions(task.examples("train", 200)):
        numbers = re.findall(r"\d+", expression)
        assert 2 <= len(numbers) <= 3
        assert {len(number) for number in numbers} in ({1}, {2}, {3})
