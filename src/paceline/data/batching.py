"""Groups rows of similar length into batches to limit padding."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_MAX_PADDED_RATIO = 2  # positions of a padded batch / real tokens in it


def batches_of_like_length(
    lengths: Sequence[int], most_rows: int, added: Sequence[int] = (), limit: int | None = None
) -> Iterator[list[int]]:
    """Yield the row indices of each batch, shortest rows first; each row appears once.

    Args:
        lengths: Number of tokens of each row, padded to the longest in the batch.
        most_rows: Maximum number of rows in a batch.
        added: Number of tokens appended to each row, padded separately; empty for none.
        limit: Maximum padded length, `added` included, of a batch of several rows; None: no limit.
    """

    def fits(rows: list[int]) -> bool:
        longest = max(lengths[row] for row in rows)
        appended = max(added[row] for row in rows) if added else 0
        short_enough = limit is None or longest + appended <= limit
        num_tokens = sum(lengths[row] for row in rows)
        little_padding = len(rows) * longest <= _MAX_PADDED_RATIO * num_tokens
        return len(rows) <= most_rows and short_enough and little_padding

    rows: list[int] = []
    for row in sorted(range(len(lengths)), key=lengths.__getitem__):
        if rows and not fits([*rows, row]):
            yield rows
            rows = []
        rows.append(row)
    if rows:
        yield rows
