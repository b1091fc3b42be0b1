"""Tasks from a user's own text: prompts alone, or prompts with reference answers.

Test examples come from `corpus`, training examples from `train_corpus`; prompts that are in both
are only used for testing.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, NoReturn

from paceline.data.prompts import CorpusConfig, Record, corpus_fingerprint, read_records
from paceline.errors import PromptError, UsageError
from paceline.fingerprints import short_hash
from paceline.models.chat_text import text_of
from paceline.tasks import scoring
from paceline.tasks.base import Task, TaskExample, as_row, pick
from paceline.tasks.docstrings import first_line

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.tasks.base import Split


class Corpora(Task):
    """Base of tasks whose examples are the records of a corpus."""

    corpus: CorpusConfig
    train_corpus: CorpusConfig | None = None

    def choose(
        self, split: Split, count: int, seed: int, reference_of: Callable[[Record], str]
    ) -> list[TaskExample]:
        """Distinct records of one of the corpora, as `Task.examples`."""
        records, name = read_records(self.corpus), self.corpus.path
        if split == "train":
            if self.train_corpus is None:
                raise UsageError(f"no training text besides {name}; name a train_corpus")
            tested = {record.asked for record in records}
            name = f"{self.train_corpus.path}, without the prompts of {name},"
            records = [r for r in read_records(self.train_corpus) if r.asked not in tested]
        found = {json.dumps(as_row(r)): TaskExample(r, reference_of(r)) for r in records}
        return pick(found, count, seed, name, "request fewer or give more text")


class Unscored(Corpora):
    """Base of corpora whose answers are not scored, for timing and agreement."""

    no_metric: ClassVar[str]
    """What `score` says."""

    @property
    def metric(self) -> None:
        return None

    def examples(self, split: Split, count: int, seed: int = 0) -> list[TaskExample]:
        """Distinct records of a corpus.

        Raises:
            PromptError: the corpus cannot be read.
            UsageError: it has fewer records, or no train_corpus is configured.
        """
        return self.choose(split, count, seed, lambda _: "")

    def score(self, example: TaskExample, answer: str) -> NoReturn:
        """Unsupported.

        Raises:
            UsageError: always.
        """
        raise UsageError(self.no_metric)

    def versions(self) -> dict[str, str]:
        """Hash of a local corpus."""
        return corpus_version(self.corpus)


class PlainText(Unscored):
    """Prompts of any corpus, for timing only; answers are not scored.

    Attributes:
        corpus: Corpus of test prompts.
        train_corpus: Corpus of training text.
    """

    task: Literal["text"] = "text"
    no_metric: ClassVar[str] = (
        "the text task has no metric; use one that has, such as arithmetic or docstrings, or give "
        "prompts with completions as task pairs"
    )


class Pairs(Corpora):
    """Prompts with reference answers: a completion, or the last message of a chat.

    Attributes:
        corpus: Corpus of test pairs.
        train_corpus: Corpus of training pairs.
        metric: Metric that compares an answer with the reference.
        first_line_only: Score only the first non-blank line of an answer, for base models, which
            continue after the answer.
    """

    task: Literal["pairs"] = "pairs"
    metric: scoring.Metric = "exact_match"
    first_line_only: bool = False

    def examples(self, split: Split, count: int, seed: int = 0) -> list[TaskExample]:
        """Distinct pairs.

        Raises:
            PromptError: the corpus cannot be read, or a record has no answer.
            UsageError: it has fewer pairs, or no train_corpus is configured.
        """
        return self.choose(split, count, seed, _reference)

    def score(self, example: TaskExample, answer: str) -> float:
        """Value of the metric, 0 to 1.

        Raises:
            UsageError: the metric's library is not installed.
        """
        scored = first_line(answer) if self.first_line_only else answer
        return scoring.score_text(self.metric, example.reference, scored)

    def versions(self) -> dict[str, str]:
        """Versions of the metric's libraries, and the hash of a local corpus."""
        return scoring.metric_versions(self.metric) | corpus_version(self.corpus)


def _reference(record: Record) -> str:
    match record:
        case Record(kind="prompt", completion=str(answer)):
            return answer
        case Record(kind="chat", messages=(_, *_, {"role": "assistant", "content": content})):
            if (answer := text_of(content)).strip():
                return answer
    raise PromptError(
        f"{record.where} has no reference answer as text; give it a completion, or a last message "
        "by the assistant"
    )


def corpus_version(corpus: CorpusConfig) -> dict[str, str]:
    """Hash of a local corpus; empty for a hub data set."""
    path = Path(corpus.path)
    if not path.is_file():
        found = corpus_fingerprint(corpus)
        return {"corpus": found} if found else {}
    return {"corpus": short_hash([path.read_bytes()])}


class Chat(Unscored):
    """Messages of users, such as instructions or open questions; answers are not scored.

    A prompt or a document becomes a message of the user, with its completion as the answer. Chats
    are used as they are.

    Attributes:
        corpus: Corpus of test prompts.
        train_corpus: Corpus of training prompts.
        system: Message of the system before each prompt that is not a chat.
    """

    version: ClassVar[int] = 1

    task: Literal["chat"] = "chat"
    system: str | None = None

    no_metric: ClassVar[str] = (
        "the chat task has no metric; use questions, math or another task with reference answers"
    )

    def choose(
        self, split: Split, count: int, seed: int, reference_of: Callable[[Record], str]
    ) -> list[TaskExample]:
        """The records as chats; raises PromptError for one that has tokens instead of text."""
        found = super().choose(split, count, seed, reference_of)
        return [TaskExample(self._as_chat(example.record), "") for example in found]

    def versions(self) -> dict[str, str]:
        """Version of the task, and the hash of a local corpus."""
        return {"task_version": str(self.version), **corpus_version(self.corpus)}

    def _as_chat(self, record: Record) -> Record:
        if record.kind == "chat":
            return record
        texts = (record.text, record.completion)
        if any(isinstance(text, list) for text in texts):
            raise PromptError(f"{record.where} has tokens; wanted a text to send as a message")
        roles = ("system", self.system), ("user", record.text), ("assistant", record.completion)
        messages = tuple({"role": role, "content": str(text)} for role, text in roles if text)
        return dataclasses.replace(record, kind="chat", text="", completion=None, messages=messages)
