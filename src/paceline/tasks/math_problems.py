"""Tasks with a number as answer: word problems of a data set, and generated problems and sums.

A hash of a generated problem holds out one in ten for the test split, independently of the seed.
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
from paceline.tasks.base import Task, TaskExample, check_count, exchange
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


class GSMSymbolic(Task):
    """Generated variants of GSM8K problems, from reasoning_gym's gsm_symbolic.

    Both splits share the templates of the questions and differ in names and numbers.

    Attributes:
        chat: Send each prompt as a message of the user, for instruction-tuned models.
    """

    version: ClassVar[int] = 2

    task: Literal["gsm_symbolic"] = "gsm_symbolic"
    chat: bool = False

    @property
    def metric(self) -> Literal["accuracy"]:
        """Fraction of answers with the correct number."""
        return "accuracy"

    def examples(self, split: Split, count: int, seed: int = 0) -> list[TaskExample]:
        """Distinct problems with their worked answers.

        Raises:
            UsageError: reasoning_gym is not installed.
        """
        check_count(count)
        held_out = split == "test"
        found = (item for item in _draw(seed) if _is_held_out(item["question"]) == held_out)
        return [
            TaskExample(
                self._record(item, f"gsm_symbolic {split} example {number}"), item["answer"]
            )
            for number, item in enumerate(itertools.islice(found, count))
        ]

    def score(self, example: TaskExample, answer: str) -> float:
        """1 if reasoning_gym's scorer gives full marks to the final number, else 0.

        Raises:
            UsageError: reasoning_gym is not installed.
        """
        return _marks(final_number(answer), example.reference)

    def versions(self) -> dict[str, str]:
        """Versions of the task and of reasoning_gym."""
        return {
            "task_version": str(self.version),
            "reasoning-gym": scoring.installed_version("reasoning-gym"),
        }

    def _record(self, item: dict[str, Any], where: str) -> Record:
        worked = item["metadata"]["answer_cot"]
        if self.chat:
            return exchange(where, item["question"], worked)
        prompt = f"Question: {item['question']}\nAnswer:"
        return Record(where, "prompt", text=prompt, completion=f" {worked}")


def _draw(seed: int) -> Iterator[dict[str, Any]]:
    seen: set[str] = set()
    for item in _generated("gsm_symbolic", seed, size=500):
        # The scorer overlooks a minus, and some worked answers end in another number.
        usable = (
            _marks(item["answer"], item["answer"]) == 1
            and final_number(item["metadata"]["answer_cot"]) == item["answer"]
        )
        if usable and item["question"] not in seen:
            seen.add(item["question"])
            yield item


def _generated(name: str, seed: int, **settings: Any) -> Iterator[dict[str, Any]]:
    """Problems of a generator of reasoning_gym, without end."""
    create = scoring.reasoning_gym().create_dataset
    for part in itertools.count():
        # Hashed, because generators give nearly the same problems for consecutive seeds.
        digest = hashlib.sha256(f"{seed}:{part}".encode()).digest()
        yield from create(name, seed=int.from_bytes(digest[:8], "big"), **settings)


def _marks(number: str | None, answer: str) -> float:
    score = scoring.reasoning_gym().get_score_answer_fn("gsm_symbolic")
    return float(score(number, {"answer": answer}) == 1.0)


def _is_held_out(problem: str) -> bool:
    return is_held_out(problem, _HELD_OUT_SHARE)


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
        min_digits: Minimum digits per number; all numbers of an expression have the same.
        max_digits: Maximum digits per number.
    """

    task: Literal["arithmetic"] = "arithmetic"
    min_terms: int = Field(default=3, ge=2)
    max_terms: int = Field(default=5, ge=2)
    min_digits: int = Field(default=1, ge=1)
    max_digits: int = Field(default=2, ge=1)

    @model_validator(mode="after")
    def _limits_in_order(self) -> Arithmetic:
        for name in ("terms", "digits"):
            low, high = getattr(self, f"min_{name}"), getattr(self, f"max_{name}")
            if low > high:
                raise ValueError(f"min_{name} is {low}, above max_{name} {high}; lower it")
        return self

    @property
    def metric(self) -> Literal["accuracy"]:
        """Fraction of answers whose last number is correct."""
        return "accuracy"

    def examples(self, split: Split, count: int, seed: int = 0) -> list[TaskExample]:
        """Expressions of one split, drawn by reasoning_gym.

        Raises:
            UsageError: fewer than `count` distinct test expressions exist, or reasoning_gym is not
                installed.
        """
        check_count(count)
        match split:
            case "test":
                self._check_available(count)
                chosen = _distinct(sum_ for sum_ in self._draw(seed) if _is_held_out(sum_[0]))
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

        Raises:
            UsageError: reasoning_gym is not installed.
        """
        line, _, _ = f"{example.record.text}{answer}".partition("\n")
        return scoring.score_sum(example.reference, line.rpartition("=")[2].strip())

    def versions(self) -> dict[str, str]:
        """Version of reasoning_gym, which draws the expressions and scores the answers."""
        return {"reasoning-gym": scoring.installed_version("reasoning-gym")}

    def _draw(self, seed: int) -> Iterator[tuple[str, str]]:
        settings = self.model_dump(exclude={"task"})
        for item in _generated("chain_sum", seed, size=1000, **settings):
            yield item["metadata"]["expression"], item["answer"]

    def _check_available(self, count: int) -> None:
        shapes = list(self._shapes())
        total = sum(len(_numbers(digits)) ** terms * 2 ** (terms - 1) for terms, digits in shapes)
        if count <= total * _HELD_OUT_SHARE / 2:
            return  # of 200 or more expressions, more than half the expected share is held out
        existing = sum(map(_is_held_out, self._expressions()))
        if count > existing:
            raise UsageError(
                f"arithmetic has {existing} distinct test examples with these settings, {count} "
                "were requested; request fewer or raise max_terms or max_digits"
            )

    def _shapes(self) -> Iterator[tuple[int, int]]:
        return itertools.product(
            range(self.min_terms, self.max_terms + 1), range(self.min_digits, self.max_digits + 1)
        )

    def _expressions(self) -> Iterator[str]:
        for terms, digits in self._shapes():
            first = [str(number) for number in _numbers(digits)]
            further = [f" {sign} {number}" for sign in "+-" for number in first]
            yield from map("".join, itertools.product(first, *[further] * (terms - 1)))


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


def _numbers(digits: int) -> range:
    return range(0 if digits == 1 else 10 ** (digits - 1), 10**digits)


def _distinct(sums: Iterator[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    seen: set[str] = set()
    for expression, result in sums:
        if expression not in seen:
            seen.add(expression)
            yield expression, result


def _shows_held_out(expression: str) -> bool:
    *steps, _ = work_out(expression)
    return any(map(_is_held_out, [expression, *steps]))
