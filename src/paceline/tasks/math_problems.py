"""Tasks of word problems with a number as answer: a data set like GSM8K, or generated ones."""

from __future__ import annotations

import hashlib
import itertools
from decimal import Decimal
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from paceline.data.prompts import Record
from paceline.errors import PromptError
from paceline.tasks import scoring
from paceline.tasks.base import TaskExample, TaskModel, check_count
from paceline.tasks.numbers import final_number
from paceline.tasks.row_task import RowTask

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.tasks.base import Split

_HELD_OUT_SHARE = 0.1
_BATCH = 500  # problems per call of reasoning_gym


class Math(RowTask):
    """Problems of a data set whose answers end in a number, such as `#### 42` in GSM8K.

    Attributes:
        prompt: Template of a prompt.
    """

    version: ClassVar[int] = 3

    task: Literal["math"] = "math"
    prompt: str = "Question: {source}\nAnswer:"

    @property
    def metric(self) -> Literal["accuracy"]:
        """Fraction of answers with the correct number."""
        return "accuracy"

    def score(self, example: TaskExample, answer: str) -> float:
        """1 if the final number is the reference's, digit by digit, else 0; "18.0" is not "18".

        As the evaluation that was released with GSM8K, except that an answer without `####` counts
        with its last number, and that "$" before and a full stop after a number are left out.
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


class GSMSymbolic(TaskModel):
    """Generated variants of GSM8K problems, from reasoning_gym's gsm_symbolic.

    A hash of the question holds out one in ten for the test split, independently of the seed. Both
    splits share the templates of the questions and differ in names and numbers.

    Attributes:
        chat: Send each prompt as a message of the user, for instruction-tuned models.
    """

    version: ClassVar[int] = 1

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

    def signatures(self) -> dict[str, str]:
        """The same as `versions`."""
        return self.versions()

    def _record(self, item: dict[str, Any], where: str) -> Record:
        worked = item["metadata"]["answer_cot"]
        if self.chat:
            question = {"role": "user", "content": item["question"]}
            answer = {"role": "assistant", "content": worked}
            return Record(where, "chat", messages=(question, answer))
        prompt = f"Question: {item['question']}\nAnswer:"
        return Record(where, "prompt", text=prompt, completion=f" {worked}")


def _draw(seed: int) -> Iterator[dict[str, Any]]:
    create = scoring.reasoning_gym().create_dataset
    seen: set[str] = set()
    for part in itertools.count():
        # Hashed, because gsm_symbolic adds the index of a problem to its seed.
        digest = hashlib.sha256(f"{seed}:{part}".encode()).digest()
        for item in create("gsm_symbolic", seed=int.from_bytes(digest[:8], "big"), size=_BATCH):
            # The scorer overlooks a minus, and some worked answers end in another number.
            usable = (
                _marks(item["answer"], item["answer"]) == 1
                and final_number(item["metadata"]["answer_cot"]) == item["answer"]
            )
            if usable and item["question"] not in seen:
                seen.add(item["question"])
                yield item


def _marks(number: str | None, answer: str) -> float:
    score = scoring.reasoning_gym().get_score_answer_fn("gsm_symbolic")
    return float(score(number, {"answer": answer}) == 1.0)


def _is_held_out(question: str) -> bool:
    digest = hashlib.sha256(question.encode()).digest()
    return int.from_bytes(digest[:4], "big") / 2**32 < _HELD_OUT_SHARE
