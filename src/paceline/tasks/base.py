"""What a task is, how its examples are chosen, and how they become a file to train on.

An example is in one split, train or test, whatever the seed and however many are asked for.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, TypeVar

from paceline.config import StrictModel
from paceline.errors import UsageError
from paceline.records import atomic_write_text

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from paceline.data.prompts import Record

Split: TypeAlias = Literal["train", "test"]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TaskExample:
    """A prompt, and what a good answer says.

    Attributes:
        record: The prompt or chat, with the reference answer in full, as a draft may be trained on.
        reference: What the score compares with: the result of a sum, a reference summary. Empty
            where a task has no metric.
    """

    record: Record
    reference: str


class Task(Protocol):
    """Gives prompts and judges answers. Every task is a frozen configuration, tagged by `task`."""

    @property
    def task(self) -> str:
        """The tag."""
        ...

    @property
    def metric(self) -> str | None:
        """What `score` computes, such as accuracy; None where answers cannot be judged."""
        ...

    def examples(self, split: Split, count: int, seed: int = 0) -> list[TaskExample]:
        """Exactly `count` examples; fewer of them are the first of more, for one seed.

        Raises:
            UsageError: there are not so many; the message says how many there are.
        """
        ...

    def score(self, example: TaskExample, answer: str) -> float:
        """How good the answer is, 0 to 1; the mean over examples is the task's result.

        Raises:
            UsageError: the task has no metric, or its library is not installed.
        """
        ...

    def versions(self) -> dict[str, str]:
        """Versions of the libraries that decide examples and scores.

        Raises:
            UsageError: a library is not installed.
        """
        ...


class OwnTask(StrictModel, ABC):
    """What a task of your own derives from: see docs/guides/add_a_task.md.

    Its fields are its settings; `metric` says what `score` computes.
    """

    @property
    def task(self) -> str:
        """The class's name."""
        return type(self).__name__

    @property
    def metric(self) -> str | None:
        return "score"

    @abstractmethod
    def examples(self, split: Split, count: int, seed: int = 0) -> list[TaskExample]:
        """See `Task.examples`."""

    @abstractmethod
    def score(self, example: TaskExample, answer: str) -> float:
        """See `Task.score`."""

    def versions(self) -> dict[str, str]:
        """Of libraries that decide examples and scores: none."""
        return {}


def write_examples(task: Task, split: Split, count: int, path: Path, seed: int = 0) -> int:
    """Write examples with their reference answers as JSON lines that `read_records` reads.

    Returns:
        How many of the examples are distinct: a task may draw training examples with replacement.

    Raises:
        UsageError: as `Task.examples`.
        StorageError: the file cannot be written.
    """
    examples = task.examples(split, count, seed)
    lines = [json.dumps(as_row(example.record)) + "\n" for example in examples]
    atomic_write_text(path, "".join(lines))
    return len(set(lines))


def as_row(record: Record) -> dict[str, Any]:
    """The record as one object of a `.jsonl` file."""
    match record.kind:
        case "chat":
            return {"messages": list(record.messages)}
        case "document":
            return {"text" if isinstance(record.text, str) else "tokens": record.text}
        case "prompt":
            row: dict[str, Any] = {"prompt": record.text}
            return row if record.completion is None else {**row, "completion": record.completion}


def pick(found: Mapping[str, T], count: int, seed: int, name: str, remedy: str) -> list[T]:
    """`count` of what was found, in an order that the keys and the seed decide.

    Raises:
        UsageError: less was found, or nothing is asked for.
    """
    check_count(count)
    if count > len(found):
        raise UsageError(
            f"{name} has {len(found)} distinct examples, {count} were asked for; {remedy}"
        )
    order = sorted(found, key=lambda key: hashlib.sha256(f"{seed}\n{key}".encode()).digest())
    return [found[key] for key in order[:count]]


def check_count(count: int) -> None:
    """Refuse to choose no example."""
    if count < 1:
        raise UsageError(f"{count} examples were asked for; ask for at least 1")
