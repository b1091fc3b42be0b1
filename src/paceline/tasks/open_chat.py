"""Task of open chat: prompts in a chat template, for speed and agreement of draft and target."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar, Literal, NoReturn

from paceline.errors import PromptError, UsageError
from paceline.tasks.base import TaskExample
from paceline.tasks.corpora import Corpora, corpus_version

if TYPE_CHECKING:
    from paceline.data.prompts import Record
    from paceline.tasks.base import Split


class Chat(Corpora):
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

    @property
    def metric(self) -> None:
        return None

    def examples(self, split: Split, count: int, seed: int = 0) -> list[TaskExample]:
        """Distinct records of a corpus as chats.

        Raises:
            PromptError: the corpus cannot be read, or a record has tokens instead of text.
            UsageError: it has fewer records, or no train_corpus is configured.
        """
        found = self.choose(split, count, seed, lambda _: "")
        return [TaskExample(self._as_chat(example.record), "") for example in found]

    def score(self, example: TaskExample, answer: str) -> NoReturn:
        """Unsupported.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            "the chat task has no metric; use questions, math or another task with reference "
            "answers"
        )

    def versions(self) -> dict[str, str]:
        """Version of the task, and the hash of a local corpus."""
        return {"task_version": str(self.version), **corpus_version(self.corpus)}

    def signatures(self) -> dict[str, str]:
        """The same as `versions`."""
        return self.versions()

    def _as_chat(self, record: Record) -> Record:
        if record.kind == "chat":
            return record
        texts = (record.text, record.completion)
        if any(isinstance(text, list) for text in texts):
            raise PromptError(f"{record.where} has tokens; wanted a text to send as a message")
        roles = ("system", self.system), ("user", record.text), ("assistant", record.completion)
        messages = tuple({"role": role, "content": str(text)} for role, text in roles if text)
        return dataclasses.replace(record, kind="chat", text="", completion=None, messages=messages)
