"""Report progress of long-running work to a callback."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Progress callback; the command line draws a progress bar."""

    def __call__(self, stage: str, done: float, total: float, note: str = "") -> None:
        """`done` of `total` in this stage is finished; `note` is a remark such as the loss."""
        ...


def silent(stage: str, done: float, total: float, note: str = "") -> None:
    """Ignore progress."""
