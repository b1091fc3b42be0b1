"""The interface of tasks: examples, their choice, their prompts in tokens, and their scores.

An example belongs to one split, train or test, independently of seed and count.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

from paceline.config import StrictModel
from paceline.data.prompts import Record
from paceline.data.tokens import asked, encode_prompt, encode_prompts, thoughts_end
from paceline.errors import ContextLengthError, UsageError
from paceline.models.token_text import answer_text
from paceline.records import atomic_write_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from paceline.core.bootstrap import Interval
    from paceline.models.contract import Tokenizer


Split: TypeAlias = Literal["train", "test"]
T = TypeVar("T")
_PROMPT_END = 16  # tokens of a prompt, which may open thoughts


@dataclass(frozen=True, slots=True)
class TaskExample:
    """A prompt with its reference answer.

    Attributes:
        record: The prompt or chat with the full reference answer, usable for training.
        reference: The part that the metric compares, such as the result of a sum; empty if the task
            has no metric.
        alternatives: Further references that are as good as `reference`.
    """

    record: Record
    reference: str
    alternatives: tuple[str, ...] = ()


class Task(StrictModel, ABC):
    """Provides prompts and scores answers; a frozen configuration tagged by `task`.

    Attributes:
        task: Name of the task.
        metric: Name of the metric that `score` computes, such as accuracy; None if there is none.
    """

    if TYPE_CHECKING:  # fields or properties
        task: Any
        metric: Any

    @abstractmethod
    def examples(self, split: Split, count: int, seed: int = 0) -> list[TaskExample]:
        """Exactly `count` examples; with the same seed, a smaller count gives a prefix.

        Raises:
            UsageError: there are fewer; the message says how many.
        """

    @abstractmethod
    def score(self, example: TaskExample, answer: str) -> float:
        """Score of the answer, 0 to 1; the task's result is the mean over examples.

        Raises:
            UsageError: the task has no metric, or its library is not installed.
        """

    def corpus_scores(
        self, examples: Sequence[TaskExample], answers: Sequence[str]
    ) -> dict[str, Interval]:
        """Figures of all answers together, by name; in the scale of their reference implementation.

        For figures that are not the mean of `score`, such as corpus BLEU. Result rows contain them.
        The bounds of one without an interval are NaN.
        """
        return {}

    def versions(self) -> dict[str, str]:
        """What examples and scores depend on: data, task version, libraries, metric settings."""
        return {}


class OwnTask(Task):
    """Base class of user-defined tasks; see docs/guides/add_a_task.md.

    Fields are settings; `metric` names what `score` computes.
    """

    @property
    def task(self) -> str:
        return type(self).__name__

    @property
    def metric(self) -> str | None:
        return "score"


def examples_of(task: Task, split: Split, count: int, seed: int = 0) -> list[TaskExample]:
    """`Task.examples`; also raises a UsageError if a task returns another number than `count`."""
    found = task.examples(split, count, seed)
    if len(found) != count:
        raise UsageError(
            f"the task {task.task} returned {len(found)} examples of its {split} split, {count} "
            "were requested; request fewer, or return exactly that many"
        )
    return found


def score_of(task: Task, example: TaskExample, answer: str) -> float:
    """`Task.score`; also raises a UsageError if it is not between 0 and 1."""
    score = task.score(example, answer)
    if not 0 <= score <= 1:
        raise UsageError(
            f"the task {task.task} scored an answer with {score}; wanted a number from 0 to 1"
        )
    return score


def write_examples(task: Task, split: Split, count: int, path: Path, seed: int = 0) -> int:
    """Write examples with their reference answers as JSON lines for `read_records`.

    Returns:
        The number of distinct examples; a task may draw training examples with replacement.
    """
    examples = examples_of(task, split, count, seed)
    lines = [json.dumps(as_row(example.record)) + "\n" for example in examples]
    atomic_write_text(path, "".join(lines))
    return len(set(lines))


def as_row(record: Record) -> dict[str, Any]:
    """The record as a JSON object for a `.jsonl` file."""
    match record.kind:
        case "chat":
            tools = {"tools": list(record.tools)} if record.tools else {}
            arguments = record.template_kwargs
            rest = {"chat_template_kwargs": dict(arguments)} if arguments else {}
            return {"messages": list(record.messages), **tools, **rest}
        case "document":
            return {"text" if isinstance(record.text, str) else "tokens": record.text}
        case "prompt":
            row: dict[str, Any] = {"prompt": record.text}
            return row if record.completion is None else {**row, "completion": record.completion}


def exchange(where: str, question: str, answer: str) -> Record:
    """A chat of one question and its answer."""
    turns = (("user", question), ("assistant", answer))
    messages = tuple({"role": role, "content": content} for role, content in turns)
    return Record(where, "chat", messages=messages)


def numbered(keys: Iterable[str]) -> Iterator[str]:
    """The keys, made unique: the n-th repetition of a key gets the number n."""
    seen: Counter[str] = Counter()
    for key in keys:
        yield f"{key} {seen[key]}" if seen[key] else key
        seen[key] += 1


def pick(
    found: Mapping[str, T],
    count: int,
    seed: int,
    name: str,
    remedy: str,
    kind: str = "distinct examples",
) -> list[T]:
    """Choose `count` values in an order determined by the keys and the seed."""
    check_count(count)
    if count > len(found):
        raise UsageError(f"{name} has {len(found)} {kind}, {count} were requested; {remedy}")
    order = sorted(found, key=lambda key: hashlib.sha256(f"{seed}\n{key}".encode()).digest())
    return [found[key] for key in order[:count]]


def check_count(count: int) -> None:
    """Raise UsageError if `count` is below 1."""
    if count < 1:
        raise UsageError(f"{count} examples were requested; request at least 1")


@dataclass(frozen=True)
class ExamplePrompts:
    """Examples of a task, and their prompts in the same order.

    Attributes:
        encoder: The prompts are those of an encoder, so answers do not continue them.
    """

    task: Task
    tokenizer: Tokenizer
    examples: Sequence[TaskExample]
    prompts: list[list[int]]
    encoder: bool = field(default=False, kw_only=True)

    def answer(self, number: int, given: Sequence[int] | str) -> tuple[str, str]:
        """An answer to example `number` as text: its thoughts, and what is scored."""
        prompt = [] if self.encoder else self.prompts[number]
        opens = str(self.tokenizer.decode(prompt[-_PROMPT_END:]))
        if isinstance(given, str):
            end = thoughts_end(given, opens, self.tokenizer)
            return given[:end], given[end:]

        def first(count: int) -> str:
            return answer_text(self.tokenizer, given[:count], prompt, skip_special_tokens=False)

        end = thoughts_end(first(len(given)), opens, self.tokenizer)
        count = bisect_left(range(len(given)), end, key=lambda count: len(first(count)))
        scored = answer_text(self.tokenizer, given[count:], [*prompt, *given[:count]])
        return first(count), scored

    def score(self, number: int, answer: Sequence[int] | str) -> float | None:
        """Score of an answer to example `number`; None if the task has no metric."""
        if self.task.metric is None:
            return None
        return score_of(self.task, self.examples[number], self.answer(number, answer)[1])


def example_prompts(
    task: Task,
    tokenizer: Tokenizer,
    count: int,
    *,
    skip: int = 0,
    seed: int = 0,
    limit: int | None = None,
    encoder: bool = False,
) -> ExamplePrompts:
    """`count` examples of the test split after the first `skip`.

    `limit`: the largest number of tokens of a prompt. `encoder`: prompts of an encoder-decoder.

    Raises:
        UsageError: the task cannot be used, or a prompt has more tokens than `limit`.
    """
    examples = examples_of(task, "test", skip + count, seed)[skip:]
    chat = getattr(task, "chat", False)
    records = asked([example.record for example in examples], tokenizer, chat)
    if encoder:
        prompts = encode_prompts(records, tokenizer, max_tokens=limit, encoder=True)
    else:
        prompts = [_whole(record, tokenizer, limit) for record in records]
    return ExamplePrompts(task, tokenizer, examples, prompts, encoder=encoder)


def _whole(record: Record, tokenizer: Tokenizer, limit: int | None) -> list[int]:
    """The prompt of a decoder-only model; truncation would remove its examples or its question."""
    tokens = encode_prompt(record, tokenizer)
    if limit is not None and len(tokens) > limit:
        raise ContextLengthError(
            f"{record.where} has {len(tokens)} tokens, more than max_prompt_tokens "
            f"{limit}; raise it, or use shorter examples"
        )
    return tokens
