"""Sums and differences worked out step by step, from reasoning_gym's chain_sum.

The splits are disjoint by a hash of the expression alone: one in ten is held out, for every seed,
count and setting. Nor does a worked answer of the training split pass through one of them: from
"9 - 5 + 3 - 1" comes "4 + 3 - 1", and if that is held out, the longer one is not trained on.
"""

from __future__ import annotations

import hashlib
import itertools
from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

from paceline.config import StrictModel
from paceline.data.prompts import Record
from paceline.errors import UsageError
from paceline.tasks import scoring
from paceline.tasks.base import TaskExample, check_count

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.tasks.base import Split

_HELD_OUT_SHARE = 0.1
_DRAWN_AT_ONCE = 1000


class Arithmetic(StrictModel):
    """Prompt "4 - 3 + 12 =", reference answer " 1 + 12 = 13"; only the last number is judged.

    Test examples are distinct. Training examples are drawn with replacement and may repeat.

    Attributes:
        min_terms: Least numbers in an expression.
        max_terms: Most of them.
        min_digits: Least digits of a number; all numbers of an expression have as many.
        max_digits: Most of them.
    """

    task: Literal["arithmetic"] = "arithmetic"
    min_terms: int = Field(default=3, ge=2)
    max_terms: int = Field(default=5, ge=2)
    min_digits: int = Field(default=1, ge=1)
    max_digits: int = Field(default=2, ge=1)

    @model_validator(mode="after")
    def _limits_in_order(self) -> Arithmetic:
        for name in ("terms", "digits"):
            least, most = getattr(self, f"min_{name}"), getattr(self, f"max_{name}")
            if least > most:
                raise ValueError(f"min_{name} is {least}, above max_{name}, {most}; lower it")
        return self

    @property
    def metric(self) -> Literal["accuracy"]:
        """Share of answers whose last number is right."""
        return "accuracy"

    def examples(self, split: Split, count: int, seed: int = 0) -> list[TaskExample]:
        """Expressions as reasoning_gym draws them, those of the other split left out.

        Raises:
            UsageError: fewer than `count` distinct expressions are held out with these settings,
                or reasoning_gym is not installed.
        """
        check_count(count)
        match split:
            case "test":
                self._check_that_there_are(count)
                chosen = _distinct(sum_ for sum_ in self._draw(seed) if _is_held_out(sum_[0]))
            case "train":
                chosen = (sum_ for sum_ in self._draw(seed) if not _shows_held_out(sum_[0]))
        return [
            TaskExample(
                Record(
                    f"arithmetic {split} example {number}",
                    "prompt",
                    text=f"{expression} =",
                    completion=" " + " = ".join(work_out(expression)),
                ),
                reference=result,
            )
            for number, (expression, result) in enumerate(itertools.islice(chosen, count))
        ]

    def score(self, example: TaskExample, answer: str) -> float:
        """1 if what stands after the last "=" of prompt and answer is the result, else 0.

        Only the answer's first line counts: a model that goes on to the next sum is not wrong.

        Raises:
            UsageError: reasoning_gym is not installed.
        """
        line, _, _ = f"{example.record.text}{answer}".partition("\n")
        return scoring.score_sum(example.reference, line.rpartition("=")[2].strip())

    def versions(self) -> dict[str, str]:
        """That of reasoning_gym, which draws the expressions and judges the results."""
        return {"reasoning-gym": scoring.installed_version("reasoning-gym")}

    def _draw(self, seed: int) -> Iterator[tuple[str, str]]:
        """Expressions and their results, without end."""
        create = scoring.reasoning_gym().create_dataset
        for part in itertools.count():
            # The library's seeds 0 and 1 have all but one expression in common.
            digest = hashlib.sha256(f"{seed}:{part}".encode()).digest()
            drawn = create(
                "chain_sum",
                seed=int.from_bytes(digest[:8], "big"),
                size=_DRAWN_AT_ONCE,
                **self.model_dump(exclude={"task"}),
            )
            for item in drawn:
                yield item["metadata"]["expression"], item["answer"]

    def _check_that_there_are(self, count: int) -> None:
        """Refuse to look for more held-out expressions than exist."""
        total = sum(
            len(_numbers(digits)) ** terms * 2 ** (terms - 1) for terms, digits in self._shapes()
        )
        if count <= total * _HELD_OUT_SHARE / 2:
            return  # there are 200 expressions or more, and chance leaves out no half of a share
        existing = sum(map(_is_held_out, self._expressions()))
        if count > existing:
            raise UsageError(
                f"arithmetic has {existing} distinct test examples with these settings, {count} "
                "were asked for; ask for fewer or raise max_terms or max_digits"
            )

    def _shapes(self) -> Iterator[tuple[int, int]]:
        """Every number of terms with every number of digits."""
        return itertools.product(
            range(self.min_terms, self.max_terms + 1), range(self.min_digits, self.max_digits + 1)
        )

    def _expressions(self) -> Iterator[str]:
        """All that can be drawn."""
        for terms, digits in self._shapes():
            first = [str(number) for number in _numbers(digits)]
            further = [f" {sign} {number}" for sign in "+-" for number in first]
            yield from map("".join, itertools.product(first, *[further] * (terms - 1)))


def work_out(expression: str) -> list[str]:
    """What the expression becomes, one operation at a time from the left.

    "4 - 3 + 12" -> ["1 + 12", "13"]
    """
    first, *rest = expression.split()
    value = int(first)
    sides: list[str] = []
    while rest:
        sign, number, *rest = rest
        value += int(number) if sign == "+" else -int(number)
        sides.append(" ".join([str(value), *rest]))
    return sides


def _numbers(digits: int) -> range:
    return range(0 if digits == 1 else 10 ** (digits - 1), 10**digits)


def _distinct(sums: Iterator[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    seen: set[str] = set()
    for expression, result in sums:
        if expression not in seen:
            seen.add(expression)
            yield expression, result


def _shows_held_out(expression: str) -> bool:
    *sides, _ = work_out(expression)
    return any(map(_is_held_out, [expression, *sides]))


def _is_held_out(expression: str) -> bool:
    digest = hashlib.sha256(expression.encode()).digest()
    return int.from_bytes(digest[:4], "big") / 2**32 < _HELD_OUT_SHARE
