"""Base of tasks whose examples are rows of a data set: a prompt from columns, reference answers.

A row becomes a prompt by a template. Few-shot examples come from the training corpus and never
contain a prompt of the test corpus.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field, field_validator, model_validator

from paceline.data.prompts import CorpusConfig, Record, read_columns
from paceline.errors import PromptError, UsageError
from paceline.tasks.base import TaskExample, TaskModel, check_count, numbered, pick
from paceline.tasks.corpora import corpus_version

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paceline.tasks.base import Split

SHOT_BREAK = "\n\n"
_SOURCE = "source"
_PLACEHOLDER = re.compile(r"\{([A-Za-z_][\w.]*)\}")


@dataclass(frozen=True, slots=True)
class Item:
    """One row: its prompt without few-shot examples, and the texts of its references."""

    where: str
    prompt: str
    references: tuple[str, ...]


class RowTask(TaskModel):
    """Settings that tasks on rows of a data set share.

    Attributes:
        corpus: Test rows. `prompt_field` names the column of the source text, by default `prompt`,
            and `completion_field` the column of the reference answer, by default `completion`.
        train_corpus: Training rows, also for few-shot examples; with columns of its own.
        prompt: Template of a prompt. `{source}` is the source text, and `{name}` any other column.
        separator: Text between a prompt and its answer in few-shot and training text; not in chats.
        num_shots: Number of training examples with answers before each prompt.
        chat: Send each prompt as a message of the user, for instruction-tuned models.
        stop: An answer ends before the first of these texts. Plain few-shot answers also end at a
            blank line.
    """

    version: ClassVar[int] = 2
    """Increases when examples, prompts or scores of the task change."""

    corpus: CorpusConfig
    train_corpus: CorpusConfig | None = None
    prompt: str = "{source}"
    separator: str = " "
    num_shots: int = Field(default=0, ge=0)
    chat: bool = False
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()

    @field_validator("prompt")
    @classmethod
    def _has_placeholder(cls, prompt: str) -> str:
        if not _PLACEHOLDER.search(prompt):
            raise ValueError(f"prompt {prompt!r} shows no column; put {{source}} where it belongs")
        return prompt

    @model_validator(mode="after")
    def _shots_have_a_corpus(self) -> RowTask:
        if self.num_shots and self.train_corpus is None:
            raise ValueError(
                f"num_shots is {self.num_shots}, but there is no train_corpus to take examples "
                "from; name one, or set num_shots to 0"
            )
        return self

    def examples(self, split: Split, count: int, seed: int = 0) -> list[TaskExample]:
        """Rows of a corpus, each after the same few-shot examples.

        Training rows are distinct. A row that the test corpus repeats is an example each time, as
        in scores of the whole corpus by other programs.

        Raises:
            PromptError: the corpus cannot be read, or a row lacks a column, a text or a reference.
            UsageError: it has fewer rows, or no train_corpus is configured.
        """
        check_count(count)
        test = list(self.items(self.corpus))
        training = self._training(test) if split == "train" or self.num_shots else []
        taken = self.num_shots + (count if split == "train" else 0)
        name = f"{self.train_corpus and self.train_corpus.path}, without the prompts of the test,"
        learnt = _pick_distinct(training, taken, seed, name) if taken else []
        shots = learnt[: self.num_shots]
        match split:
            case "train":
                chosen = learnt[self.num_shots :]
            case "test":
                keys = numbered(map(_key, test))
                found = dict(zip(keys, test, strict=True))
                name, remedy = self.corpus.path, "request fewer or give more rows"
                chosen = pick(found, count, seed, name, remedy, kind="examples")
        return [self._example(item, shots) for item in chosen]

    def versions(self) -> dict[str, str]:
        """Version of the task and fingerprints of its data."""
        found = {"task_version": str(self.version), "corpus": self._fingerprint(self.corpus)}
        if self.num_shots and self.train_corpus is not None:
            found["train_corpus"] = self._fingerprint(self.train_corpus)
        return found

    def signatures(self) -> dict[str, str]:
        """The same as `versions`."""
        return self.versions()

    def cut(self, answer: str) -> str:
        """The part of an answer that is scored, without white space around it."""
        answer = answer.strip()
        stops = (*self.stop, SHOT_BREAK) if self.num_shots and not self.chat else self.stop
        ends = [end for text in stops if (end := answer.find(text)) >= 0]
        return answer[: min(ends, default=len(answer))].strip()

    def read_references(self, value: Any, name: str, where: str) -> tuple[str, ...]:
        """The reference answers in a column; a task may accept other values than a text.

        Raises:
            PromptError: there is none.
        """
        if not isinstance(value, str):
            raise PromptError(
                f"{where} has no reference answer as text in column {name}; fill it or leave the "
                "row out"
            )
        return (value,)

    def compared(self, reference: str) -> str:
        """The part of a reference that is compared with an answer."""
        return reference

    def _training(self, test: Sequence[Item]) -> list[Item]:
        if self.train_corpus is None:
            raise UsageError(f"no training text besides {self.corpus.path}; name a train_corpus")
        tested = {item.prompt for item in test}
        return [item for item in self.items(self.train_corpus) if item.prompt not in tested]

    def items(self, corpus: CorpusConfig) -> Iterator[Item]:
        """Every row of a corpus; raises PromptError for one that cannot be used."""
        source, answer = corpus.prompt_field or "prompt", corpus.completion_field or "completion"
        column_of = {
            name: source if name == _SOURCE else name for name in _PLACEHOLDER.findall(self.prompt)
        }
        for values, where in read_columns(corpus, sorted({*column_of.values(), answer})):
            texts = {key: _as_text(values[name], name, where) for key, name in column_of.items()}
            prompt = _PLACEHOLDER.sub(lambda found, texts=texts: texts[found[1]], self.prompt)
            yield Item(where, prompt, self.read_references(values[answer], answer, where))

    def _example(self, item: Item, shots: Sequence[Item]) -> TaskExample:
        if self.chat:
            turns = [turn for shown in (*shots, item) for turn in _turns(shown)]
            record = Record(item.where, "chat", messages=tuple(turns))
        else:
            before = [f"{s.prompt}{self.separator}{s.references[0]}{SHOT_BREAK}" for s in shots]
            text = "".join(before) + item.prompt
            completion = f"{self.separator}{item.references[0]}"
            record = Record(item.where, "prompt", text=text, completion=completion)
        reference, *alternatives = map(self.compared, item.references)
        return TaskExample(record, reference, tuple(alternatives))

    def _fingerprint(self, corpus: CorpusConfig) -> str:
        if found := corpus_version(corpus):
            return found["corpus"]
        return _content_hash(type(self), self.model_dump_json(), corpus.model_dump_json())


def _key(item: Item) -> str:
    return json.dumps([item.prompt, item.references])


def _pick_distinct(items: Sequence[Item], count: int, seed: int, name: str) -> list[Item]:
    found = {_key(item): item for item in items}
    return pick(found, count, seed, name, "request fewer or give more rows")


def _as_text(value: Any, name: str, where: str) -> str:
    if isinstance(value, str):
        return value
    kind = type(value).__name__
    raise PromptError(f"{where} has a {kind} in column {name}; wanted a text for the prompt")


def _turns(item: Item) -> tuple[dict[str, str], dict[str, str]]:
    return (
        {"role": "user", "content": item.prompt},
        {"role": "assistant", "content": item.references[0]},
    )


@cache
def _content_hash(kind: type[RowTask], settings: str, corpus: str) -> str:
    """Hash of the rows of a hub data set, which does not change while a program runs."""
    task = kind.model_validate_json(settings)
    digest = hashlib.sha256()
    for item in task.items(CorpusConfig.model_validate_json(corpus)):
        digest.update(_key(item).encode())
    return digest.hexdigest()[:16]
