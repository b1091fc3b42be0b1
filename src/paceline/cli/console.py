"""The terminal: results on stdout, progress bars and remarks on stderr."""

from __future__ import annotations

import contextlib
import time
import warnings
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.progress import Progress as Listener

_QUIET_S = 30  # between two lines of progress in a file

# what is printed names files and errors, in which [v2] and :smile: mean nothing
stdout = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
stderr = Console(stderr=True, highlight=False, soft_wrap=True, markup=False, emoji=False)


def show_warnings_in_one_line() -> None:
    """A warning is a remark to the user: without the line of source that it came from."""

    def show(message: Warning | str, *_: object) -> None:
        stderr.print(f"paceline: warning: {message}")

    warnings.showwarning = show


@contextlib.contextmanager
def progress_bars() -> Iterator[Listener]:
    """Draw a bar for each stage of the work inside the block; a file gets a line now and then."""
    if not stderr.is_terminal:
        yield _occasional_lines()
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=stderr) as bars:
        tasks: dict[str, int] = {}

        def listen(stage: str, done: float, total: float, note: str = "") -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total, note=note)
            bars.update(tasks[stage], completed=done, total=total, note=note)  # pyright: ignore[reportArgumentType]

        yield listen


def _occasional_lines() -> Listener:
    last = time.monotonic()

    def listen(stage: str, done: float, total: float, note: str = "") -> None:
        nonlocal last
        if time.monotonic() - last >= _QUIET_S:
            last = time.monotonic()
            stderr.print(f"{stage} {done / total:.0%} {note}".rstrip())

    return listen
