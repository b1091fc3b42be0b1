"""Tasks with a number as answer: word problems of a data set, and generated sums.

A hash of a generated sum holds out one in ten for the test split, independently of the seed.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from decimal import Decimal
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, model_validator

from paceline.data.prompts import Record
from paceline.data.python_docs import is_held_out
from paceline.errors import PromptError, UsageError
from paceline.tasks import scoring
from paceline.tasks.base import Task, TaskExample, check_count
from paceline.tasks.row_task import RowTask

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.tasks.base import Split


_HELD_OUT_SHARE = 0.1
_MARK = "####"
# A minus after a digit, a letter or a bracket is a subtraction. A comma separates thousands.
_NUMBER = re.compile(r"(?:(?<![\w)])-)?\$?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")
_MARKED = re.compile(rf"{_MARK}\s*({_NUMBER.pattern})")


class Math(RowTask):
    """Problems of a data set whose answers end in a number, such as `#### 42` in GSM8K.

    Attributes:
        prompt: Template of a prompt.
    """

    version: ClassVar[int] = 4

    task: Literal["math"] = "math"
    prompt: str = "Question: {source}\nAnswer:"

    @property
    def metric(self) -> Literal["accuracy"]:
        """Fraction of answers with the correct number."""
        return "accuracy"

    def score(self, example: TaskExample, answer: str) -> float:
        """1 if the final number is the reference's, digit by digit, else 0; "18.0" is not "18".

        As the evaluation that was released with GSM8K, except that an answer without a number after
        `####` counts with its last number, and that "$" before and a full stop after a number are
        left out.
        """
        return float(final_number(self.cut(answer)) == example.reference)

    def read_references(self, value: Any, name: str, where: str) -> tuple[str, ...]:
        """A worked answer, or a number; raises PromptError if it has no number."""
        if isinstance(value, int | float) and not isinstance(value, bool):
            value = f"{Decimal(int(value) if float(value).is_integer() else str(value)):f}"
        found = super().read_references(value, name, where)
        if final_number(found[0]) is None:
            raise PromptError(
                f"{where} has no number in column {name}; wanted an answer that ends in one, such "
                "as #### 42"
            )
        return found

    def compared(self, reference: str) -> str:
        """The final number."""
        return final_number(reference) or ""


def final_number(text: str) -> str | None:
    """The first number that directly follows a `####`, or else the last one behind all marks.

    `#### Step 1` is a heading, not an answer. Models without instruction tuning go on after their
    answer, often with another problem. "$1,234." becomes "1234", and so does LaTeX's "1{,}234".
    None if there is no number.
    """
    text = text.replace("{,}", ",").replace("\N{MINUS SIGN}", "-")
    marked = _MARKED.search(text)
    found = [marked[1]] if marked else _NUMBER.findall(text.rpartition(_MARK)[2])
    return re.sub(r"[,$]", "", found[-1]) if found else None


class Arithmetic(Task):
    """Prompt "4 - 3 + 12 =", reference answer " 1 + 12 = 13"; only the last number is scored.

    Test examples are distinct. Training examples are drawn with replacement and may repeat. One is
    dropped if an intermediate step is held out: "9 - 5 + 3 - 1" has the step "4 + 3 - 1".

    Attributes:
        min_terms: Minimum count of numbers in an expression.
        max_terms: Maximum count of numbers in an expression.
        max_digits: Maximum digits per number; all numbers of an expression have the same.
    """

    task: Literal["arithmetic"] = "arithmetic"
    min_terms: int = Field(default=3, ge=2)
    max_terms: int = Field(default=5, ge=2)
    max_digits: int = Field(default=2, ge=1)

    @model_validator(mode="after")
    def _limits_in_order(self) -> Arithmetic:
        low, high = self.min_terms, self.max_terms
        if low > high:
            raise ValueError(f"min_terms is {low}, above max_terms {high}; lower it")
        return self

    @property
    def metric(self) -> Literal["accuracy"]:
        """Fraction of answers whose last number is correct."""
        return "accuracy"

    def examples(self, split: Split, count: int, seed: int = 0) -> list[TaskExample]:
        """Expressions of one split, drawn by reasoning_gym."""
        check_count(count)
        match split:
            case "test":
                self._check_available(count)
                chosen = _distinct(
                    sum_ for sum_ in self._draw(seed) if is_held_out(sum_[0], _HELD_OUT_SHARE)
                )
            case "train":
                chosen = (sum_ for sum_ in self._draw(seed) if not _shows_held_out(sum_[0]))
        examples: list[TaskExample] = []
        for number, (expression, result) in enumerate(itertools.islice(chosen, count)):
            where = f"arithmetic {split} example {number}"
            answer = " " + " = ".join(work_out(expression))
            record = Record(where, "prompt", text=f"{expression} =", completion=answer)
            examples.append(TaskExample(record, reference=result))
        return examples

    def score(self, example: TaskExample, answer: str) -> float:
        """1 if the number after the last "=" of prompt and answer is correct, else 0.

        Only the first line of the answer counts, so a model may continue with another sum.
        """
        line, _, _ = f"{example.record.text}{answer}".partition("\n")
        return scoring.score_sum(example.reference, line.rpartition("=")[2].strip())

    def versions(self) -> dict[str, str]:
        """Version of reasoning_gym, which draws the expressions and scores the answers."""
        return {"reasoning-gym": scoring.installed_version("reasoning-gym")}

    def _draw(self, seed: int) -> Iterator[tuple[str, str]]:
        create = scoring.optional("reasoning_gym").create_dataset
        settings = self.model_dump(exclude={"task"}) | {"min_digits": 1}
        for part in itertools.count():
            # Hashed, because the generator gives nearly the same sums for consecutive seeds.
            digest = hashlib.sha256(f"{seed}:{part}".encode()).digest()
            number = int.from_bytes(digest[:8], "big")
            for item in create("chain_sum", seed=number, size=1000, **settings):
                yield item["metadata"]["expression"], item["answer"]

    def _check_available(self, count: int) -> None:
        shapes = itertools.product(
            range(self.min_terms, self.max_terms + 1), range(1, self.max_digits + 1)
        )
        total = sum(_numbers(digits) ** terms * 2 ** (terms - 1) for terms, digits in shapes)
        # of 200 or more expressions, more than half the expected share is held out
        most = int(total * _HELD_OUT_SHARE / 2)
        if count > most:
            raise UsageError(
                f"arithmetic has {most} test examples with these settings, {count} were requested; "
                "request fewer or raise max_terms or max_digits"
            )


def work_out(expression: str) -> list[str]:
    """Evaluate one operation at a time from the left: "4 - 3 + 12" -> ["1 + 12", "13"]."""
    first, *rest = expression.split()
    value = int(first)
    steps: list[str] = []
    while rest:
        sign, number, *rest = rest
        value += int(number) if sign == "+" else -int(number)
        steps.append(" ".join([str(value), *rest]))
    return steps


def _numbers(digits: int) -> int:
    return 10 if digits == 1 else 9 * 10 ** (digits - 1)


def _distinct(sums: Iterator[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    seen: set[str] = set()
    for expression, result in sums:
        if expression not in seen:
            seen.add(expression)
            yield expression, result


def _shows_held_out(expression: str) -> bool:
    *steps, _ = work_out(expression)
    return any(is_held_out(one, _HELD_OUT_SHARE) for one in (expression, *steps))
