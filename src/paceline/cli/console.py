"""The terminal: results on stdout, progress bars and remarks on stderr."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import threading
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

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

from paceline.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.progress import Progress as Listener

_FIRST_S = 0.9  # until the first line of progress in a file
_QUIET_S = 30  # between two of them

# what is printed names files and errors, in which [v2] and :smile: mean nothing
stdout = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
stderr = Console(stderr=True, highlight=False, soft_wrap=True, markup=False, emoji=False)


class CheckedOutput:
    """Standard output that fails as an error of Paceline's own, whoever writes to it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._failure: StorageError | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write as the stream does.

        Raises:
            StorageError: the stream does not take it.
        """
        with self._failing_as_ours():
            return self._stream.write(text)

    def flush(self) -> None:
        """Flush as the stream does.

        Raises:
            StorageError: the stream does not take what was written.
        """
        with self._failing_as_ours():
            self._stream.flush()

    @contextlib.contextmanager
    def _failing_as_ours(self) -> Iterator[None]:
        if self._failure is not None:  # a library may have swallowed the first one
            raise self._failure
        try:
            yield
        except OSError as error:
            self._discard()
            self._failure = StorageError(
                f"standard output could not be written ({error.strerror or error}); the result is not "
                "complete: send it to a file or a pipe that takes all of it"
            )
            raise self._failure from None

    def _discard(self) -> None:
        """Python flushes once more when it exits, and would complain and change the exit code."""
        with contextlib.suppress(OSError, ValueError), Path(os.devnull).open("w") as nowhere:
            os.dup2(nowhere.fileno(), self._stream.fileno())


@contextlib.contextmanager
def checked_output() -> Iterator[None]:
    """Notice inside the block that something printed is lost, at the latest at its end.

    Raises:
        StorageError: standard output is closed, or does not take what is written to it.
    """
    if sys.stderr is None:  # pyright: ignore[reportUnnecessaryComparison]
        sys.stderr = io.StringIO()  # nobody reads it, and nothing fails
    if sys.stdout is None:  # pyright: ignore[reportUnnecessaryComparison]
        raise StorageError(
            "standard output is closed, so the result would be lost; send it to a file or to "
            "/dev/null"
        )
    if isinstance(sys.stdout, io.TextIOWrapper):
        # a terminal that knows fewer characters than a text has gets escapes instead of an error
        sys.stdout.reconfigure(errors="backslashreplace")
    checked = CheckedOutput(sys.stdout)
    with contextlib.redirect_stdout(checked):  # pyright: ignore[reportArgumentType]
        try:
            yield
        finally:
            checked.flush()


def say(message: str) -> None:
    """One line on stderr, as far as there is one."""
    with contextlib.suppress(OSError):
        print(f"paceline: {message}", file=sys.stderr)  # noqa: T201


def show_warnings_in_one_line() -> None:
    """A warning is a remark to the user: without the line of source that it came from."""

    def show(message: Warning | str, *_: object) -> None:
        stderr.print(f"paceline: warning: {message}")

    warnings.showwarning = show


@contextlib.contextmanager
def progress_bars() -> Iterator[Listener]:
    """Draw a bar for each stage of the work inside the block; a file gets a line now and then."""
    if not stderr.is_terminal:
        lines = _OccasionalLines()
        lines.start()
        try:
            yield lines
        finally:
            lines.end()
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


class _OccasionalLines(threading.Thread):
    """What a file gets: a line in the first second, and then now and then, whoever is busy."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._state = "starting"
        self._ended = threading.Event()

    def __call__(self, stage: str, done: float, total: float, note: str = "") -> None:
        self._state = f"{stage} {done / total:.0%} {note}".rstrip()

    def run(self) -> None:
        """Print where the work is, until it ends."""
        pause = _FIRST_S
        while not self._ended.wait(pause):
            stderr.print(self._state)
            pause = _QUIET_S

    def end(self) -> None:
        """Print nothing more."""
        self._ended.set()
        self.join()
