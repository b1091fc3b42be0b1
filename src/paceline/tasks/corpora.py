"""A user's own text as a task: prompts alone, or pairs of a prompt and a good answer.

Test examples are those of `corpus`, training examples those of `train_corpus`. What is asked in the
first is left out of the second.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NoReturn

from paceline.config import StrictModel
from paceline.data.prompts import CorpusConfig, Record, corpus_fingerprint, read_records
from paceline.errors import PromptError, UsageError
from paceline.tasks import scoring
from paceline.tasks.base import TaskExample, as_row, pick
from paceline.tasks.docstrings import first_line

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.tasks.base import Split


class _Corpora(StrictModel):
    """Text to test with and, perhaps, to train on."""

    corpus: CorpusConfig
    train_corpus: CorpusConfig | None = None

    def _choose(
        self, split: Split, count: int, seed: int, refer: Callable[[Record], str]
    ) -> list[TaskExample]:
        """Records with what `refer` says is their answer; every one of the corpus is looked at."""
        tested = read_records(self.corpus)
        name, records = self.corpus.path, tested
        if split == "train":
            if self.train_corpus is None:
                raise UsageError(f"there is no text to train on beside {name}; name a train_corpus")
            asked = {_asked(record) for record in tested}
            name = f"{self.train_corpus.path}, less what {name} asks,"
            records = [r for r in read_records(self.train_corpus) if _asked(r) not in asked]
        found = {json.dumps(as_row(r)): TaskExample(r, refer(r)) for r in records}
        return pick(found, count, seed, name, "ask for fewer or give more text")


class PlainText(_Corpora):
    """Prompts of any corpus, for timing; there is nothing to judge an answer by.

    Attributes:
        corpus: Where the test prompts are.
        train_corpus: Where the training text is.
    """

    task: Literal["text"] = "text"

    @property
    def metric(self) -> None:
        """There is none."""
        return

    def examples(self, split: Split, count: int, seed: int = 0) -> list[TaskExample]:
        """Distinct records, as they stand in the corpus.

        Raises:
            PromptError: the corpus cannot be read.
            UsageError: it has fewer records, or none to train on were named.
        """
        return self._choose(split, count, seed, lambda _: "")

    def score(self, example: TaskExample, answer: str) -> NoReturn:
        """Not possible.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            "the text task has no metric; name one that has, such as arithmetic or docstrings, or "
            "give prompts with completions as task pairs"
        )

    def versions(self) -> dict[str, str]:
        """Of the corpus; nothing is scored."""
        return _contents(self.corpus)


class Pairs(_Corpora):
    """Prompts with reference answers: a completion, or the last message of a chat.

    Attributes:
        corpus: Where the test pairs are.
        train_corpus: Where the training pairs are.
        metric: How an answer is compared with the reference.
        first_line_only: Judge an answer by its first line that is not blank, since a base model
            does not stop where its answer ends.
    """

    task: Literal["pairs"] = "pairs"
    metric: scoring.Metric = "exact_match"
    first_line_only: bool = False

    def examples(self, split: Split, count: int, seed: int = 0) -> list[TaskExample]:
        """Distinct pairs.

        Raises:
            PromptError: the corpus cannot be read, or a record has no answer (the line is named).
            UsageError: it has fewer pairs, or none to train on were named.
        """
        return self._choose(split, count, seed, _reference)

    def score(self, example: TaskExample, answer: str) -> float:
        """The metric, 0 to 1.

        Raises:
            UsageError: the metric's library is not installed.
        """
        judged = first_line(answer) if self.first_line_only else answer
        return scoring.score_text(self.metric, example.reference, judged)

    def versions(self) -> dict[str, str]:
        """Of the metric's library and of the corpus."""
        return scoring.metric_versions(self.metric) | _contents(self.corpus)


def _reference(record: Record) -> str:
    match record:
        case Record(kind="prompt", completion=str(answer)):
            return answer
        case Record(kind="chat", messages=(_, *_, {"role": "assistant", "content": answer})):
            if answer.strip():
                return answer
    raise PromptError(
        f"{record.where} has no answer as text to compare with; give it a completion, or a last "
        "message by the assistant"
    )


def _contents(corpus: CorpusConfig) -> dict[str, str]:
    """What stands in a local file, or in those of a directory, as a digest."""
    path = Path(corpus.path)
    if not path.is_file():
        found = corpus_fingerprint(corpus)
        return {"corpus": found} if found else {}
    return {"corpus": hashlib.sha256(path.read_bytes()).hexdigest()[:16]}


def _asked(record: Record) -> str:
    """What a model is given of a record."""
    messages = list(record.messages)
    if messages and messages[-1]["role"] == "assistant":
        messages.pop()
    return json.dumps([record.text, messages])
