"""Terminal output: results on stdout, progress and messages on stderr."""

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
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from paceline.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.progress import Progress as Listener

_FIRST_S = 0.9  # seconds until the first progress line, if stderr is not a terminal
_QUIET_S = 30  # seconds between progress lines

# no markup, no emoji: file names and errors may contain [v2] or :smile:
stdout = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
stderr = Console(stderr=True, highlight=False, soft_wrap=True, markup=False, emoji=False)


class CheckedOutput:
    """Standard output whose write errors are raised as StorageError."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._failure: StorageError | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write; raises StorageError if the stream fails."""
        with self._storage_errors():
            return self._stream.write(text)

    def flush(self) -> None:
        """Flush; raises StorageError if the stream fails."""
        with self._storage_errors():
            self._stream.flush()

    @contextlib.contextmanager
    def _storage_errors(self) -> Iterator[None]:
        if self._failure is not None:  # a library may have suppressed the first error
            raise self._failure
        try:
            yield
        except OSError as error:
            # Python flushes again at exit; a second error would change the exit code
            with contextlib.suppress(OSError, ValueError), Path(os.devnull).open("w") as null:
                os.dup2(null.fileno(), self._stream.fileno())
            self._failure = StorageError(
                f"standard output could not be written ({error.strerror or error}); the result is "
                "not complete: redirect it to a file with enough space"
            )
            raise self._failure from None


@contextlib.contextmanager
def checked_output() -> Iterator[None]:
    """Raise StorageError, at the latest at the block's end, if standard output loses a write."""
    if sys.stderr is None:  # pyright: ignore[reportUnnecessaryComparison]
        sys.stderr = io.StringIO()  # writes to stderr must not fail
    if sys.stdout is None:  # pyright: ignore[reportUnnecessaryComparison]
        raise StorageError(
            "standard output is closed and the result would be lost; redirect it to a file"
        )
    if isinstance(sys.stdout, io.TextIOWrapper):
        # characters that the terminal's encoding lacks become escapes instead of errors
        sys.stdout.reconfigure(errors="backslashreplace")
    checked = CheckedOutput(sys.stdout)
    with contextlib.redirect_stdout(checked):  # pyright: ignore[reportArgumentType]
        try:
            yield
        finally:
            checked.flush()


def say(message: str) -> None:
    """Print one line to stderr; errors are ignored."""
    with contextlib.suppress(OSError):
        print(f"paceline: {message}", file=sys.stderr)  # noqa: T201


def show_warnings_in_one_line() -> None:
    """Print warnings without the source line."""

    def show(message: Warning | str, *_: object) -> None:
        stderr.print(f"paceline: warning: {message}")

    warnings.showwarning = show


@contextlib.contextmanager
def progress_bars() -> Iterator[Listener]:
    """Show a progress bar per stage, or occasional lines if stderr is not a terminal."""
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
        tasks: dict[str, TaskID] = {}

        def listen(stage: str, done: float, total: float, note: str = "") -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total, note=note)
            bars.update(tasks[stage], completed=done, total=total, note=note)

        yield listen


class _OccasionalLines(threading.Thread):
    """Print the last reported progress in the first second, then every `_QUIET_S` seconds."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._state = "starting"
        self._ended = threading.Event()

    def __call__(self, stage: str, done: float, total: float, note: str = "") -> None:
        self._state = f"{stage} {done / total:.0%} {note}".rstrip()

    def run(self) -> None:
        """Print progress until `end`."""
        pause = _FIRST_S
        while not self._ended.wait(pause):
            stderr.print(self._state)
            pause = _QUIET_S

    def end(self) -> None:
        """Stop printing."""
        self._ended.set()
        self.join()
