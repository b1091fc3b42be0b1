"""Answers of a cell, and the files that keep them.

    rows.jsonl      a result row per cell, finished or failed; of several, the last one counts
    answers.jsonl   the tokens of each finished cell's answers, by its key; predictions read those
                    of the target alone

A row's `source.fingerprints` have two digests. `context`: of everything that the cells of a bench
share: models, task, examples, seed. `key`: of the context and the decoding; it tells which cells
are finished.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

from paceline.core.stats import TimedAnswer
from paceline.errors import UsageError
from paceline.records import append_jsonl, read_jsonl
from paceline.results import row as row_file
from paceline.results.frontier import TARGET_ALONE, family_of, with_target_scores

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from paceline.decode import Generation
    from paceline.results.row import Row

    Answer = Generation | TimedAnswer
    """An answer of a cell; one that was made with others is not timed."""
    Texts = list[list[int]]

ROWS, ANSWERS = "rows.jsonl", "answers.jsonl"
SAMPLED = ("temperature", "top_p", "top_k", "repetition_penalty")


def sums_of_answer(answer: Answer, score: float | None) -> dict[str, float]:
    """Sums of an answer by name. `score`: None if the task has no metric."""
    sums: dict[str, float] = {} if score is None else {"score": score}
    sums |= {"tokens": len(answer.tokens), **answer.stats.sums}
    return sums | answer.times.sums() if isinstance(answer, TimedAnswer) else sums


def digest(*parts: Any) -> str:
    """Digest of JSON values, 16 hexadecimal digits."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def key_of(row: Row) -> str:
    """Key of the row's cell."""
    return row.source.fingerprints["key"]


def context_of(row: Row) -> str:
    """Digest of what the row shares with the others of its bench."""
    return row.source.fingerprints["context"]


def read_rows(folder: Path, context: str | None = None) -> list[Row]:
    """The rows of each cell with this context; None: the context of the last row."""
    rows = _read(folder)
    if context is None and rows:
        context = context_of(rows[-1])
    return [row for row in rows if context_of(row) == context]


def keep(folder: Path, rows: Iterable[Row], texts: Mapping[str, Texts] | None = None) -> None:
    """Add rows, which replace earlier ones of the same cells, and texts of answers by key."""
    for key, tokens in (texts or {}).items():  # first, so that a finished row has its texts
        append_jsonl(folder / ANSWERS, {"key": key, "tokens": tokens})
    for row in rows:
        append_jsonl(folder / ROWS, row_file.as_values(row))


def complete(folder: Path) -> None:
    """Write the file of rows again: a row per cell, with the target's score of each example."""
    rows = _read(folder)

    def shared(row: Row) -> tuple[str, tuple[Any, ...]]:
        return context_of(row), tuple(row.setting.get(name) for name in SAMPLED)

    alone = {shared(row): row for row in rows if family_of(row) == TARGET_ALONE and not row.error}
    row_file.write_rows(
        folder / ROWS,
        [
            with_target_scores(row, alone[shared(row)]) if shared(row) in alone else row
            for row in rows
        ],
    )


def _read(folder: Path) -> list[Row]:
    path = folder / ROWS
    rows = row_file.read_rows(path) if path.exists() else []
    if any(not {"context", "key"} <= row.source.fingerprints.keys() for row in rows):
        raise UsageError(f"{path} has a row that no bench wrote; choose another directory")
    return rows


def read_texts(folder: Path) -> dict[str, Texts]:
    """Tokens of the answers of each cell, by its key."""
    return {values["key"]: values["tokens"] for values in read_jsonl(folder / ANSWERS)}
