"""The texts of earlier rounds: a bounded store of the target's recorded answers.

A file for each round in `store/`, and what is in them in `store/index.json`. Each step can be
repeated: a store that was interrupted comes out the same.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

import pyarrow
from pyarrow import parquet

from paceline.config import read_json
from paceline.records import atomic_write_text, storage_errors
from paceline.rng import hashed

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from paceline.follow.config import Store
    from paceline.follow.log import Logged


class Kept(NamedTuple):
    """A text in the store.

    Attributes:
        digest: Of its prompt, which is its id.
        slice: Slice of its request.
        time: Seconds since 1970.
        round: Number of the round that added it.
        target: Fingerprint of the target that wrote it.
    """

    digest: str
    slice: str
    time: float
    round: int
    target: str


class TextStore:
    """Texts of all rounds in a directory."""

    def __init__(self, directory: Path, config: Store) -> None:
        self.directory, self.config = directory, config
        self._index = directory / "index.json"

    def read(self) -> list[Kept]:
        """What is in the store."""
        if not self._index.exists():
            return []
        return [Kept(*row) for row in read_json(self._index)]

    def add(
        self,
        number: int,
        texts: Sequence[Path],
        requests: Iterable[Logged],
        now: float,
        target: str,
    ) -> None:
        """Add a round's texts, and remove those of earlier rounds that are too many or too old.

        Texts of another target are removed, as its states are not those of this one.

        Args:
            number: Of the round.
            texts: Files of its texts.
            requests: Its requests.
            now: Time of the round.
            target: Fingerprint of the target.
        """
        fresh = [Kept(one.digest, one.slice, one.time, number, target) for one in requests]
        older = [one for one in self.read() if one.round != number and one.target == target]
        if self.config.max_age_h is not None:
            older = [one for one in older if now - one.time <= 3600 * self.config.max_age_h]
        kept = _sample(older, self.config.max_texts)
        by_round = Counter(one.round for one in kept)
        for one in {one.round for one in self.read()} - {number}:
            self._keep(one, [each.digest for each in kept if each.round == one])
        if fresh:
            self._write(number, texts, [one.digest for one in fresh])
        atomic_write_text(self._index, json.dumps([*kept, *fresh]) + "\n")
        for path in self.directory.glob("*.parquet"):
            if path.stem not in {f"{one:06d}" for one in (*by_round, *([number] if fresh else ()))}:
                path.unlink()

    def _path(self, number: int) -> Path:
        return self.directory / f"{number:06d}.parquet"

    def _keep(self, number: int, digests: Sequence[str]) -> None:
        """Remove the other texts of a round; a file without texts is removed later."""
        path = self._path(number)
        if digests and path.exists() and parquet.read_metadata(path).num_rows > len(digests):
            self._write(number, [path], digests)

    def _write(self, number: int, texts: Sequence[Path], digests: Sequence[str]) -> None:
        """Write the texts of these prompts, atomically, a row group for each file."""
        path = self._path(number)
        ids = {f"{digest}/0" for digest in digests}
        with storage_errors(path):
            self.directory.mkdir(parents=True, exist_ok=True)
            scratch = path.with_name(f".{path.name}")
            schema = parquet.read_schema(texts[0])
            with parquet.ParquetWriter(scratch, schema) as writer:
                for text in texts:
                    table = parquet.read_table(text)
                    chosen = [name in ids for name in table["id"].to_pylist()]
                    writer.write_table(table.filter(pyarrow.array(chosen)))
            scratch.replace(path)


def _sample(texts: Sequence[Kept], most: int) -> list[Kept]:
    """At most `most` texts, an equal number of each slice: those with the smallest hashes.

    They are a uniform sample of the prompts of each slice, whatever the order of the rounds.
    """
    by_slice: dict[str, list[Kept]] = {}
    for one in texts:
        by_slice.setdefault(one.slice, []).append(one)
    kept: list[Kept] = []
    for number, name in enumerate(sorted(by_slice, key=lambda name: len(by_slice[name]))):
        share = (most - len(kept)) // (len(by_slice) - number)  # what smaller slices left over
        kept += sorted(by_slice[name], key=lambda one: hashed(one.digest))[:share]
    return sorted(kept, key=lambda one: (one.round, one.digest))
