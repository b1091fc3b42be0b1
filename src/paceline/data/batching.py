"""Which rows are processed together: rows of like length, so that little of a batch is padding."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_MOST_PADDED = 2  # tokens of a padded batch for each real one


def batches_of_like_length(
    lengths: Sequence[int], most_rows: int, added: Sequence[int] = (), limit: int | None = None
) -> Iterator[list[int]]:
    """Row numbers of each batch, the shortest rows first; every row once.

    Args:
        lengths: Tokens of each row that are padded to the longest of the batch.
        most_rows: Rows of a batch, at most.
        added: Tokens that follow each row, padded to their own longest; none: no row has any.
        limit: Both paddings together must not exceed this in a batch of several rows; None: may.
    """
    rows: list[int] = []
    for row in sorted(range(len(lengths)), key=lengths.__getitem__):
        if rows and not _fit([*rows, row], lengths, most_rows, added, limit):
            yield rows
            rows = []
        rows.append(row)
    if rows:
        yield rows


def _fit(
    rows: Sequence[int],
    lengths: Sequence[int],
    most_rows: int,
    added: Sequence[int],
    limit: int | None,
) -> bool:
    longest = max(lengths[row] for row in rows)
    behind = max((added[row] for row in rows), default=0) if added else 0
    padded, real = len(rows) * longest, sum(lengths[row] for row in rows)
    has_room = limit is None or longest + behind <= limit
    return len(rows) <= most_rows and has_room and padded <= _MOST_PADDED * real
