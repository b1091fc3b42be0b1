"""Task of summarising docstrings: from a docstring's body to its first sentence.

The test split uses the hash of `data.python_docs`, so a draft aligned on that corpus has not seen
the test examples.

It also writes pairs of source and target text, to train and test small encoder-decoders. Their
translations come from a Ding dictionary (https://dict.tu-chemnitz.de; Debian: trans-de-en), which
has example sentences. Their documents are the name of what is documented and the beginning of a
docstring's body.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import platform
import random
import re
import textwrap
from functools import cache
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from pydantic import Field

from paceline.data.prompts import Record
from paceline.data.python_docs import (
    is_held_out,
    named_docstrings,
    package_places,
    standard_library,
)
from paceline.errors import UsageError
from paceline.records import atomic_write_text
from paceline.tasks import scoring
from paceline.tasks.base import TaskExample, TaskModel, exchange, pick

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from paceline.tasks.base import Split


_SHORTEST_BODY = 80  # characters
_SHORTEST_SENTENCE, _LONGEST_SENTENCE = 20, 100
_SENTENCE_BREAK = re.compile(r"[.!?]\s")
_QUESTION = (
    "Summarize what the following Python documentation describes, in one short sentence.\n\n"
)


TRANSLATE = "translate German to English: "
SUMMARIZE = "summarize: "
_DOCUMENT = 200  # characters of a docstring's body
_REPEATS = 3  # of the pairs of both tasks in pairs_train
_FEWEST_WORDS = 3  # of a sentence
_NOTES = re.compile(r"\{[^}]*\}|\[[^\]]*\]|\([^)]*\)")
_ENDS = (".", "!", "?")

Pair = tuple[str, str]


class Docstrings(TaskModel):
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
        pairs = docstring_pairs(self.packages, self.max_body_characters)
        found = {pair.body: pair for pair in pairs if pair.held_out == (split == "test")}
        remedy = "request fewer, raise max_body_characters or name packages"
        chosen = pick(found, count, seed, f"the {split} split of docstrings", remedy)
        return [
            TaskExample(self._record(pair, f"docstrings {split} example {number}"), pair.sentence)
            for number, pair in enumerate(chosen)
        ]

    def score(self, example: TaskExample, answer: str) -> float:
        """ROUGE F-measure, 0 to 1, of the answer's first non-blank line.

        Raises:
            UsageError: rouge_score is not installed.
        """
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
    """A docstring's body and its first sentence, and the name of what it documents."""

    name: str
    body: str
    sentence: str
    held_out: bool


def first_line(answer: str) -> str:
    """The first non-blank line, stripped; empty if there is none."""
    return next((line.strip() for line in answer.split("\n") if line.strip()), "")


def docstring_pairs(
    packages: tuple[str, ...], max_body: int | None = None
) -> tuple[DocstringPair, ...]:
    """All pairs of the standard library and of installed packages; None: bodies of any length.

    Raises:
        UsageError: a package is not installed or has no Python source.
    """
    return _pairs((standard_library(), *(package_places(name)[0] for name in packages)), max_body)


@cache
def _pairs(roots: tuple[Path, ...], max_body: int | None) -> tuple[DocstringPair, ...]:
    found: dict[str, tuple[str, str]] = {}  # name and sentence of a body
    splits: dict[str, set[bool]] = {}
    for root in roots:
        for name, text in named_docstrings(root):
            first, _, body = text.strip().partition("\n\n")
            sentence, body = " ".join(first.split()), body.strip()
            if _SHORTEST_BODY <= len(body) <= (max_body or len(body)):
                splits.setdefault(body, set()).add(is_held_out(text.strip()))
                if _is_one_sentence(sentence):
                    found.setdefault(body, (name, sentence))
    return tuple(
        DocstringPair(name, body, sentence, held_out=True in splits[body])
        for body, (name, sentence) in found.items()
        # Docstrings of both splits can have the same body.
        if len(splits[body]) == 1
    )


def _is_one_sentence(text: str) -> bool:
    return (
        _SHORTEST_SENTENCE <= len(text) <= _LONGEST_SENTENCE
        and text.endswith(".")
        and not _SENTENCE_BREAK.search(text)
    )


class PairFiles(NamedTuple):
    """Files with one pair per line, `{"prompt": ..., "completion": ...}`.

    `pairs_train` has every training pair of both tasks three times, and once each phrase that is no
    sentence: phrases teach words, but there are more of them than of the other pairs.
    """

    pairs_train: Path
    translation_train: Path
    translation_test: Path
    summaries_train: Path
    summaries_test: Path


def write_pairs(folder: Path, dictionary: Path, packages: tuple[str, ...] = ()) -> PairFiles:
    """Write the files into `folder`, each atomically.

    The files of a task are shuffled, so that the first examples are a random sample: the sources
    are in the order of packages and words.

    Args:
        folder: Where to write.
        dictionary: A Ding dictionary of German and English.
        packages: Installed packages to take docstrings from, besides the standard library.

    Raises:
        UsageError: the dictionary cannot be read, or a package is not installed.
    """
    files = PairFiles(*(folder / f"{name}.jsonl" for name in PairFiles._fields))
    entries = dict(read_dictionary(dictionary))
    sentences = {de: en for de, en in entries.items() if _are_sentences(de, en)}
    phrases = [(f"{TRANSLATE}{de}", en) for de, en in entries.items() if de not in sentences]
    translations = [(f"{TRANSLATE}{de}", en) for de, en in sentences.items()]
    summaries = list(_summaries(packages))
    trained: list[Pair] = phrases
    for pairs, train, test in (
        (translations, files.translation_train, files.translation_test),
        (summaries, files.summaries_train, files.summaries_test),
    ):
        kept = [pair for pair in pairs if not is_held_out(pair[0])]
        _write(train, _shuffled(kept))
        _write(test, _shuffled([pair for pair in pairs if is_held_out(pair[0])]))
        trained = [*trained, *_REPEATS * kept]
    _write(files.pairs_train, trained)
    return files


def read_dictionary(path: Path) -> Iterator[Pair]:
    """Phrases and sentences of a Ding dictionary, German and English, without grammar notes.

    A line is `de | de :: en | en`; `;` separates synonyms, of which the first is taken.

    Raises:
        UsageError: the file cannot be read, or has no entry of this form.
    """
    found = False
    try:
        with path.open(encoding="utf-8") as stream:
            for line in stream:
                sides = [side.split("|") for side in line.split(" :: ")]
                if line.startswith("#") or len(sides) != 2 or len(sides[0]) != len(sides[1]):
                    continue
                for german, english in zip(*sides, strict=True):
                    pair = _plain(german), _plain(english)
                    if min(len(text.split()) for text in pair) > 1:
                        found = True
                        yield pair
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"the dictionary {path} cannot be read ({error}); install Debian's trans-de-en and "
            "name /usr/share/trans/de-en"
        ) from None
    if not found:
        raise UsageError(
            f"the dictionary {path} has no lines of the form `de | de :: en | en`; name a Ding "
            "dictionary such as /usr/share/trans/de-en"
        )


def _plain(text: str) -> str:
    return " ".join(_NOTES.sub("", text.split(";")[0]).split())


def _summaries(packages: tuple[str, ...]) -> Iterator[Pair]:
    """One pair of each beginning of a docstring: the same one may not be in both splits."""
    seen: set[str] = set()
    for pair in docstring_pairs(packages):
        body = textwrap.shorten(pair.body, _DOCUMENT, placeholder="")
        if body not in seen:
            seen.add(body)
            yield f"{SUMMARIZE}{pair.name}: {body}", pair.sentence


def _are_sentences(*texts: str) -> bool:
    return all(len(t.split()) >= _FEWEST_WORDS and t.endswith(_ENDS) for t in texts)


def _shuffled(pairs: Sequence[Pair]) -> list[Pair]:
    return random.Random(0).sample(pairs, len(pairs))


def _write(path: Path, pairs: Iterable[Pair]) -> None:
    rows = [{"prompt": source, "completion": target} for source, target in pairs]
    atomic_write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
