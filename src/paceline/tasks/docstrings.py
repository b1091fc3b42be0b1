"""Task of summarising docstrings: from a docstring's body to its first sentence.

The test split uses the hash of `data.python_docs`, so a draft aligned on that corpus has not seen
the test examples.
"""

from __future__ import annotations

import platform
import re
from functools import cache
from typing import TYPE_CHECKING, Literal, NamedTuple

from pydantic import Field

from paceline.data.prompts import Record
from paceline.data.python_docs import (
    is_held_out,
    read_docstrings,
    standard_library,
)
from paceline.tasks import scoring
from paceline.tasks.base import Task, TaskExample, exchange, pick

if TYPE_CHECKING:
    from pathlib import Path

    from paceline.tasks.base import Split


_SHORTEST_BODY = 80  # characters
_SHORTEST_SENTENCE, _LONGEST_SENTENCE = 20, 100
_SENTENCE_BREAK = re.compile(r"[.!?]\s")
_QUESTION = (
    "Summarize what the following Python documentation describes, in one short sentence.\n\n"
)


class Docstrings(Task):
    """Given the body of a docstring, write its first sentence.

    Attributes:
        max_body_characters: Docstrings with a longer body are excluded.
        chat: Prompt in a chat, for instruction-tuned models; false: as text to continue.
        metric: ROUGE variant.
    """

    task: Literal["docstrings"] = "docstrings"
    max_body_characters: int = Field(default=400, ge=_SHORTEST_BODY)
    chat: bool = True
    metric: scoring.Rouge = "rougeL"

    def examples(self, split: Split, count: int, seed: int = 0) -> list[TaskExample]:
        """Distinct bodies with their sentences; about one in twelve is a test example.

        Cost: parses the libraries' source once per process, in seconds.
        """
        pairs = _pairs(standard_library(), self.max_body_characters)
        found = {pair.body: pair for pair in pairs if pair.held_out == (split == "test")}
        remedy = "request fewer, or raise max_body_characters"
        chosen = pick(found, count, seed, f"the {split} split of docstrings", remedy)
        return [
            TaskExample(self._record(pair, f"docstrings {split} example {number}"), pair.sentence)
            for number, pair in enumerate(chosen)
        ]

    def score(self, example: TaskExample, answer: str) -> float:
        """ROUGE F-measure, 0 to 1, of the answer's first non-blank line."""
        return scoring.score_text(self.metric, example.reference, first_line(answer))

    def versions(self) -> dict[str, str]:
        """Versions of the scorer and of Python, whose docstrings these are."""
        return scoring.metric_versions(self.metric) | {"python": platform.python_version()}

    def _record(self, pair: DocstringPair, where: str) -> Record:
        if not self.chat:
            prompt = f"{pair.body}\n\nIn one sentence:"
            return Record(where, "prompt", text=prompt, completion=f" {pair.sentence}")
        return exchange(where, _QUESTION + pair.body, pair.sentence)


class DocstringPair(NamedTuple):
    """A docstring's body and its first sentence."""

    body: str
    sentence: str
    held_out: bool


def first_line(answer: str) -> str:
    """The first non-blank line, stripped; empty if there is none."""
    return next((line.strip() for line in answer.split("\n") if line.strip()), "")


@cache
def _pairs(root: Path, max_body: int) -> tuple[DocstringPair, ...]:
    found: dict[str, str] = {}  # sentence of a body
    splits: dict[str, set[bool]] = {}
    for text in read_docstrings(root):
        first, _, body = text.strip().partition("\n\n")
        sentence, body = " ".join(first.split()), body.strip()
        if _SHORTEST_BODY <= len(body) <= max_body:
            splits.setdefault(body, set()).add(is_held_out(text.strip()))
            if _is_one_sentence(sentence):
                found.setdefault(body, sentence)
    return tuple(
        DocstringPair(body, sentence, held_out=True in splits[body])
        for body, sentence in found.items()
        # Docstrings of both splits can have the same body.
        if len(splits[body]) == 1
    )


def _is_one_sentence(text: str) -> bool:
    return (
        _SHORTEST_SENTENCE <= len(text) <= _LONGEST_SENTENCE
        and text.endswith(".")
        and not _SENTENCE_BREAK.search(text)
    )
