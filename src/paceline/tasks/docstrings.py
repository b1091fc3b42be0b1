"""Task of summarising docstrings: from a docstring's body to its first sentence.

The test split uses the hash of `data.python_docs`, so a draft aligned on that corpus has not seen
the test examples.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import platform
import re
from functools import cache
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from pydantic import Field

from paceline.data.prompts import Record
from paceline.data.python_docs import (
    is_held_out,
    package_places,
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
        packages: Installed packages to take docstrings from, in addition to the standard library.
        max_body_characters: Docstrings with a longer body are excluded.
        chat: Prompt in a chat, for instruction-tuned models; false: as text to continue.
        metric: ROUGE variant.
    """

    task: Literal["docstrings"] = "docstrings"
    packages: tuple[Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")], ...] = ()
    max_body_characters: int = Field(default=400, ge=_SHORTEST_BODY)
    chat: bool = True
    metric: scoring.Rouge = "rougeL"

    def examples(self, split: Split, count: int, seed: int = 0) -> list[TaskExample]:
        """Distinct bodies with their sentences; about one in twelve is a test example.

        Raises:
            UsageError: there are fewer, or a package is not installed or has no Python source.

        Cost: parses the libraries' source once per process, in seconds.
        """
        roots = (standard_library(), *(package_places(name)[0] for name in self.packages))
        pairs = _pairs(roots, self.max_body_characters)
        found = {pair.body: pair for pair in pairs if pair.held_out == (split == "test")}
        remedy = "request fewer, raise max_body_characters or name packages"
        chosen = pick(found, count, seed, f"the {split} split of docstrings", remedy)
        return [
            TaskExample(self._record(pair, f"docstrings {split} example {number}"), pair.sentence)
            for number, pair in enumerate(chosen)
        ]

    def score(self, example: TaskExample, answer: str) -> float:
        """ROUGE F-measure, 0 to 1, of the answer's first non-blank line."""
        return scoring.score_text(self.metric, example.reference, first_line(answer))

    def versions(self) -> dict[str, str]:
        """Versions of the scorer, of Python and of the packages with the docstrings."""
        versions = {**scoring.metric_versions(self.metric), "python": platform.python_version()}
        for package in self.packages:
            # The distribution's name can differ from the package's.
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                versions[package] = importlib.metadata.version(package)
        return versions

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
def _pairs(roots: tuple[Path, ...], max_body: int) -> tuple[DocstringPair, ...]:
    found: dict[str, str] = {}  # sentence of a body
    splits: dict[str, set[bool]] = {}
    for root in roots:
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
