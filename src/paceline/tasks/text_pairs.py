"""Writes pairs of source and target text, to train and test small encoder-decoders.

Translations come from a Ding dictionary (https://dict.tu-chemnitz.de; Debian: trans-de-en), which
has example sentences. Summaries are first sentences of docstrings; their documents are the name of
what is documented and the beginning of the rest. A hash of the source decides whether a pair is
held out, so the split is the same on all machines.
"""

from __future__ import annotations

import json
import re
import textwrap
from typing import TYPE_CHECKING, NamedTuple

from paceline.data.python_docs import is_held_out
from paceline.errors import UsageError
from paceline.records import atomic_write_text
from paceline.tasks.docstrings import docstring_pairs

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

TRANSLATE = "translate German to English: "
SUMMARIZE = "summarize: "
_DOCUMENT = 200  # characters of a docstring's body
_REPEATS = 3  # of the pairs of both tasks in pairs_train
_FEWEST_WORDS = 3  # of a sentence
_NOTES = re.compile(r"\{[^}]*\}|\[[^\]]*\]|\([^)]*\)")
_ENDS = (".", "!", "?")

Pair = tuple[str, str]


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
        _write(train, kept)
        _write(test, [pair for pair in pairs if is_held_out(pair[0])])
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


def _write(path: Path, pairs: Iterable[Pair]) -> None:
    rows = [{"prompt": source, "completion": target} for source, target in pairs]
    atomic_write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
