"""Tasks from a user's own text: prompts alone, or prompts with reference answers.

Test examples come from `corpus`, training examples from `train_corpus`; prompts that are in both
are only used for testing.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from typing import TYPE_CHECKING, Literal, NoReturn

from paceline.data.prompts import CorpusConfig, Record, corpus_fingerprint, read_records
from paceline.errors import PromptError, UsageError
from paceline.models.chat_text import text_of
from paceline.tasks import scoring
from paceline.tasks.base import Task, TaskExample, as_row, pick

if TYPE_CHECKING:
    from paceline.tasks.base import Split


class Corpora(Task):
    """Base of tasks whose examples are the records of a corpus.

    Attributes:
        chat: Send each text as a message of the user; unset: prompts, if the model has a chat
            template, while documents are continued.
    """

    corpus: CorpusConfig
    train_corpus: CorpusConfig | None = None
    chat: bool | None = None

    def examples(self, split: Split, count: int, seed: int = 0) -> list[TaskExample]:
        """Distinct records of one of the corpora."""
        records, name = read_records(self.corpus), self.corpus.path
        if split == "train":
            if self.train_corpus is None:
                raise UsageError(f"no training text besides {name}; name a train_corpus")
            tested = {record.asked for record in records}
            name = f"{self.train_corpus.path}, without the prompts of {name},"
            records = [r for r in read_records(self.train_corpus) if r.asked not in tested]
        found = {json.dumps(as_row(record)): self.example(record) for record in records}
        return pick(found, count, seed, name, "request fewer or give more text")

    @abstractmethod
    def example(self, record: Record) -> TaskExample:
        """The example of a record."""

    def versions(self) -> dict[str, str]:
        """Hash of a local corpus."""
        return corpus_version(self.corpus)


class PlainText(Corpora):
    """Prompts of any corpus, for timing and agreement; answers are not scored.

    Attributes:
        corpus: Corpus of test prompts.
        train_corpus: Corpus of training text.
    """

    task: Literal["text"] = "text"

    @property
    def metric(self) -> None:
        return None

    def example(self, record: Record) -> TaskExample:
        """The record as it is, or as a chat."""
        return TaskExample(record.as_chat() if self.chat else record, "")

    def score(self, example: TaskExample, answer: str) -> NoReturn:
        """Unsupported; raises UsageError."""
        raise UsageError(
            "the text task has no metric; use one that has, such as arithmetic, or give prompts "
            "with completions as task pairs"
        )


class Pairs(Corpora):
    """Prompts with reference answers: a completion, or the last message of a chat.

    Attributes:
        corpus: Corpus of test pairs.
        train_corpus: Corpus of training pairs.
        metric: Metric that compares an answer with the reference.
    """

    task: Literal["pairs"] = "pairs"
    metric: scoring.Metric = "exact_match"

    def example(self, record: Record) -> TaskExample:
        return TaskExample(record, _reference(record))

    def score(self, example: TaskExample, answer: str) -> float:
        """Value of the metric, 0 to 1."""
        return scoring.score_text(self.metric, example.reference, answer)

    def versions(self) -> dict[str, str]:
        """Versions of the metric's libraries, and the hash of a local corpus."""
        return scoring.metric_versions(self.metric) | super().versions()


def _reference(record: Record) -> str:
    match record:
        case Record(kind="prompt", completion=str(answer)):
            return answer
        case Record(kind="prompt", answer=str(answer)) if answer.strip():
            return answer
        case Record(kind="chat", messages=(_, *_, {"role": "assistant", "content": content})):
            if (answer := text_of(content)).strip():
                return answer
    if not isinstance(record.completion, str | None):
        raise PromptError(
            f"{record.where} is an answer as tokens, but a metric compares texts; give rows with a "
            "prompt and a completion as texts, or chats that end with an answer"
        )
    raise PromptError(
        f"{record.where} has no reference answer as text; give it a completion, or a last message "
        "by the assistant"
    )


def corpus_version(corpus: CorpusConfig) -> dict[str, str]:
    """Hash of the files of a local corpus; empty for a hub data set."""
    found = corpus_fingerprint(corpus)
    return {"corpus": found} if found else {}
