"""Task of step-by-step sums and differences, from reasoning_gym's chain_sum.

A hash of the expression holds out one in ten, independently of seed and settings. A training
example is also dropped if an intermediate step is held out: "9 - 5 + 3 - 1" has the step
"4 + 3 - 1".
"""

from __future__ import annotations

import hashlib
import itertools
from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

from paceline.data.prompts import Record
from paceline.errors import UsageError
from paceline.tasks import scoring
from paceline.tasks.base import TaskExample, TaskModel, check_count

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.tasks.base import Split

_HELD_OUT_SHARE = 0.1
_BATCH = 1000  # expressions per call of reasoning_gym


class Arithmetic(TaskModel):
    """Prompt "4 - 3 + 12 =", reference answer " 1 + 12 = 13"; only the last number is scored.

    Test examples are distinct. Training examples are drawn with replacement and may repeat.

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
        create = scoring.reasoning_gym().create_dataset
        settings = self.model_dump(exclude={"task"})
        for part in itertools.count():
            # Hashed, because chain_sum gives nearly the same expressions for consecutive seeds.
            digest = hashlib.sha256(f"{seed}:{part}".encode()).digest()
            part_seed = int.from_bytes(digest[:8], "big")
            for item in create("chain_sum", seed=part_seed, size=_BATCH, **settings):
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


def _is_held_out(expression: str) -> bool:
    digest = hashlib.sha256(expression.encode()).digest()
    return int.from_bytes(digest[:4], "big") / 2**32 < _HELD_OUT_SHARE
