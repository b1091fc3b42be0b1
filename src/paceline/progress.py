"""How long work tells its caller how far it is, without knowing who listens."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Called as work goes on; the command line draws a bar from it."""

    def __call__(self, stage: str, done: float, total: float, note: str = "") -> None:
        """`done` of `total` of this stage is finished; `note` is a short remark such as a loss."""
        ...


def silent(stage: str, done: float, total: float, note: str = "") -> None:
    """Tell nobody."""
