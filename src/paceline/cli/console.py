"""Terminal output: results on stdout, progress and messages on stderr; unexpected exceptions.

Names, paths and generated texts are untrusted, so their control characters are escaped on a
terminal: everything is printed by `stdout`, `stderr`, `echo` or `say`.
"""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import math
import os
import re
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

from paceline.errors import (
    INTERRUPTED,
    InputNote,
    PacelineError,
    StorageError,
    is_out_of_memory,
)
from paceline.records import FULL

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from rich.console import ConsoleOptions, RenderableType
    from rich.segment import Segment

    from paceline.progress import Progress as Listener

# C0 without tab and line break, DEL, C1, and what changes the direction of a text
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def visible(text: str) -> str:
    """The text with its control characters as Python's escapes."""
    return _CONTROLS.sub(lambda found: ascii(found[0])[1:-1], text)


class _Console(Console):
    """A console that shows control characters: always on stderr, else on a terminal.

    Rich's own are no text.
    """

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        shows = self.stderr or self.is_terminal
        for segment in super().render(renderable, options):
            text = visible(segment.text) if shows and not segment.control else segment.text
            yield segment._replace(text=text)


class Output(io.TextIOWrapper):
    """Standard output that goes nowhere once its reader, such as `head`, has read enough."""

    def write(self, text: str, /) -> int:
        return self._unless_unread(super().write, text) or len(text)

    def flush(self) -> None:
        self._unless_unread(super().flush)

    def _unless_unread(self, call: Callable[..., Any], *given: Any) -> Any:
        try:
            return call(*given)
        except BrokenPipeError:
            with Path(os.devnull).open("w") as nowhere:
                os.dup2(nowhere.fileno(), self.fileno())


# no markup, no emoji: file names and errors may contain [v2] or :smile:
stdout = _Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
stderr = _Console(stderr=True, highlight=False, soft_wrap=True, markup=False, emoji=False)


def echo(text: str = "", *, nl: bool = True, err: bool = False, **style: Any) -> None:
    """Print a text as it is, or visibly as the consoles do; `style`: as `typer.style`.

    Rich would interpret tabs and break lines. It knows FORCE_COLOR and NO_COLOR.
    """
    console = stderr if err else stdout
    color = False if console.no_color else console.is_terminal or None
    shown = visible(text) if err or sys.stdout.isatty() else text
    typer.echo(typer.style(shown, **style) if style else shown, nl=nl, err=err, color=color)


def check_output() -> None:
    """Raise StorageError if standard output has lost a write."""
    try:
        sys.stdout.flush()
    except OSError as error:
        sys.stdout = None  # Python flushes again at exit, and would change the exit code
        raise StorageError(
            f"standard output could not be written ({error.strerror or error}); the result is "
            "not complete: redirect it to a file with enough space"
        ) from None


def say(message: str) -> None:
    """Print one line to stderr; errors are ignored."""
    with contextlib.suppress(OSError):
        print(f"paceline: {_line(message)}", file=sys.stderr)  # noqa: T201


def _line(message: object) -> str:
    return visible(str(message)).replace("\n", "\\n")


def show_warnings_in_one_line() -> None:
    """Print warnings without the source line, and messages of loggers."""

    def show(message: Warning | str, category: type[Warning], *_: object) -> None:
        kind = "note" if issubclass(category, InputNote) else "warning"
        stderr.print(f"paceline: {kind}: {_line(message)}")

    class Visible(logging.Formatter):
        def format(self, record: logging.LogRecord) -> str:
            return visible(super().format(record))

    warnings.showwarning = show
    handler = logging.StreamHandler()
    handler.setFormatter(Visible("paceline: %(message)s"))
    ours = logging.getLogger("paceline")
    ours.setLevel(logging.INFO)
    ours.handlers = [handler]  # of its own, as libraries configure that of all loggers
    ours.propagate = False
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(Visible())


_QUIET_S = 5.0  # after which a command without a terminal says how far it is
_BETWEEN_S = 2.0  # at least, between two of these lines


@contextlib.contextmanager
def progress_line(stages: Sequence[str] = ()) -> Iterator[Listener]:
    """Show the stage, its number, rate and time left on stderr: a bar, or a line each tenth.

    `stages`: all stages in their order, as far as they are known.
    """
    texts = (
        TextColumn(f"{{task.{name}}}", markup=False) for name in ("description", "fields[say]")
    )
    name, say_column = texts
    columns = (name, BarColumn(), TaskProgressColumn(), TimeRemainingColumn(), say_column)
    quiet_until = time.monotonic() + _QUIET_S
    starts: dict[str, tuple[float, float]] = {}
    tenths: dict[str, int] = {}
    latest: dict[str, float] = {}
    with Progress(*columns, console=stderr, disable=not stderr.is_terminal) as bars:
        task = bars.add_task("", total=None, say="")

        def listen(stage: str, done: float, total: float, note: str = "") -> None:
            nonlocal quiet_until
            now = time.monotonic()
            if done < latest.get(stage, math.inf):  # a stage that begins, or begins again
                bars.reset(task)
                starts[stage], tenths[stage] = (now, done), 0
            latest[stage] = done
            since, first = starts[stage]
            rate = (done - first) / (now - since) if now > since else 0.0
            number = f"{stages.index(stage) + 1}/{len(stages)} " if stage in stages else ""
            title, said = f"{number}{stage}", [_speed(rate)] if rate and total > 1 else []
            said += [note] if note else []
            bars.update(task, description=title, completed=done, total=total, say=", ".join(said))
            tenth = int(10 * done / total) if total else 0
            if stderr.is_terminal or now < quiet_until or tenth <= tenths[stage]:
                return
            tenths[stage], quiet_until = tenth, now + _BETWEEN_S
            said += [f"{(total - done) / rate:.0f} s left"] if rate and done < total else []
            say(", ".join([f"{title} {tenth}0%", *said]))

        yield listen


def _speed(rate: float) -> str:
    return f"{rate:.3g}/s" if rate >= 1 else f"{1 / rate:.3g} s each"


Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_LONGEST_REASON = 300


def guarded(command: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Wrap a command so that it raises only exceptions that `main` reports."""

    @functools.wraps(command)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        try:
            return command(*args, **kwargs)
        except (PacelineError, typer.Exit):
            raise
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        except Exception as error:
            raise describe_crash(error) from error

    return run


def describe_crash(error: Exception) -> PacelineError:
    """Describe an unexpected exception in one line; PACELINE_TRACEBACK prints its traceback."""
    if os.environ.get("PACELINE_TRACEBACK"):
        traceback.print_exception(error)
        return PacelineError(_reason(error))
    return PacelineError(f"{_reason(error)}; PACELINE_TRACEBACK=1 prints the traceback")


def _reason(error: Exception) -> str:
    first = " ".join(str(error).split())[:_LONGEST_REASON]
    if is_out_of_memory(error):
        detail = f" ({first})" if first else ""
        return f"memory ran out{detail}: lower batch_size, shorten the texts or free memory"
    if isinstance(error, OSError) and error.errno in FULL:
        return f"the disk is full ({first}): free space and run again"
    name = type(error).__name__
    return f"the command could not be completed: {name}: {first}" if first else f"{name} was raised"
