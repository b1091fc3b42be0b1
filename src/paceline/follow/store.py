"""The texts to train on: those of the newest round, and a bounded sample of earlier ones.

They are the target's recorded answers, in one file with their slice, time, round and origin. It is
replaced in one step, and a step that is repeated gives the same file.
"""

from __future__ import annotations

import itertools
import os
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow
from pyarrow import parquet

from paceline.records import storage_errors
from paceline.results.row import grouped
from paceline.rng import hashed

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from paceline.follow.config import Store

_AT_ONCE = 64  # texts in memory


class Kept(NamedTuple):
    """What the store has beside a text.

    Attributes:
        digest: Of its prompt.
        slice: Slice of its request.
        time: Of its request, in seconds since 1970.
        round: Number of the round that added it.
        origin: What wrote and recorded it; texts of another origin are of no use.
    """

    digest: str
    slice: str
    time: float
    round: int
    origin: str


class TextStore:
    """The texts in a file."""

    def __init__(self, path: Path, config: Store) -> None:
        self.path, self.config = path, config

    def read(self) -> list[Kept]:
        """What is in the store, without the texts."""
        if not self.path.exists():
            return []
        table = parquet.read_table(self.path, columns=list(Kept._fields))
        return [Kept(**row) for row in table.to_pylist()]

    def add(self, texts: Sequence[Path], kept: Sequence[Kept]) -> None:
        """Add the texts of a round, and remove earlier ones that are too many or too old.

        Texts of another origin are removed, too.

        Args:
            texts: Files of `generate-data`, whose ids are `DIGEST/0`.
            kept: What the store has beside each text, all of one round.
        """
        newest = kept[0]
        now = max(one.time for one in kept)
        limit_s = 3600 * (self.config.max_age_h or float("inf"))
        earlier = [
            one
            for one in self.read()
            if one.round != newest.round and one.origin == newest.origin
            if now - one.time <= limit_s
        ]
        chosen = {one.digest: one for one in _sample(earlier, self.config.max_texts)}
        added = {one.digest: one for one in kept}
        scratch = self.path.with_name(f".{self.path.name}")
        schema = parquet.read_schema(texts[0])
        for name, kind in zip(Kept._fields, _KINDS, strict=True):
            schema = schema.append(pyarrow.field(name, kind))
        places = ([self.path] if chosen else [], chosen), (texts, added)
        rows = (
            row | wanted[name]._asdict()
            for files, wanted in places
            for name, row in _rows(files)
            if name in wanted
        )
        with storage_errors(self.path), scratch.open("wb") as stream:
            with parquet.ParquetWriter(stream, schema) as writer:
                # the same groups however the files are divided: a repeated step gives equal bytes
                while group := list(itertools.islice(rows, _AT_ONCE)):
                    writer.write_table(pyarrow.Table.from_pylist(group, schema))
            stream.flush()
            os.fsync(stream.fileno())
        scratch.replace(self.path)


_KINDS = pyarrow.string(), pyarrow.string(), pyarrow.float64(), pyarrow.int64(), pyarrow.string()


def _rows(files: Iterable[Path]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rows of files with their digests; few are in memory at a time."""
    for file in files:
        with parquet.ParquetFile(file) as stream:
            for batch in stream.iter_batches(batch_size=_AT_ONCE):
                yield from ((row["id"].removesuffix("/0"), row) for row in batch.to_pylist())


def _sample(texts: Sequence[Kept], most: int) -> list[Kept]:
    """At most `most` texts, an equal number of each slice: those with the smallest hashes.

    They are a uniform sample of the prompts of each slice, whatever the order of the rounds.
    """
    by_slice = grouped(texts, lambda one: one.slice)
    kept: list[Kept] = []
    for number, name in enumerate(sorted(by_slice, key=lambda name: len(by_slice[name]))):
        share = (most - len(kept)) // (len(by_slice) - number)  # what smaller slices left over
        kept += sorted(by_slice[name], key=lambda one: hashed(one.digest))[:share]
    return kept
