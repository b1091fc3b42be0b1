"""Texts of answers that tasks score, with tokenizers that drop the space in front of a text."""

from typing import Any

import pytest

from paceline.data.prompts import Record
from paceline.tasks.base import ExamplePrompts, TaskExample
from tokenizer_families import FAMILIES, wrapped

PROMPT, ANSWER = "def f(x):\n", "    y = x\n    return y"


class _Compiles:
    task, metric = "compiles", "compiles"

    def score(self, example: TaskExample, answer: str) -> float:
        try:
            compile(example.record.text + answer, "answer", "exec")
        except SyntaxError:
            return 0.0
        return 1.0


@pytest.mark.parametrize(
    "family", [name for name in FAMILIES if name not in ("unigram", "pieces of words")]
)
def test_a_body_of_python_keeps_its_first_space(family: str):
    plain = FAMILIES[family]()
    first, whole = plain.encode(PROMPT).ids, plain.encode(PROMPT + ANSWER).ids
    answer = whole[len(first) :]
    assert plain.decode(first + answer).lstrip() == PROMPT + ANSWER
    example: Any = TaskExample(Record("1", "prompt", text=PROMPT), "")
    task: Any = _Compiles()
    found = ExamplePrompts(task, wrapped(plain), [example], [first])
    assert found.text(answer, 0) == found.text(answer) == ANSWER
    assert found.score(0, answer) == found.score(0, ANSWER) == 1.0
    if family.startswith("a space"):  # what the same tokens are alone
        assert found.score(0, plain.decode(answer)) == 0.0


def test_an_answer_of_a_decoder_with_an_encoder_begins_a_text():
    plain = FAMILIES["unigram"]()
    prompt, answer = plain.encode("the cat").ids, plain.encode("the cat sat").ids
    task: Any = _Compiles()
    found = ExamplePrompts(task, wrapped(plain), [], [prompt], encoder=True)
    assert found.text(answer, 0) == "the cat sat"
