"""Report unexpected exceptions as one line with exit code 3 and a traceback in a log file.

An uncaught exception would exit with code 1, which means NO-GO.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import platform
import shlex
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import typer

import paceline
from paceline.cache import cache_directory
from paceline.config import masked
from paceline.errors import INTERRUPTED, CrashError, PacelineError
from paceline.records import FULL

if TYPE_CHECKING:
    from collections.abc import Callable

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

# torch and CUDA raise a plain RuntimeError with one of these messages.
_NO_MEMORY = ("can't allocate memory", "not enough memory", "out of memory", "std::bad_alloc")
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


def describe_crash(error: Exception) -> CrashError:
    """Describe an unexpected exception in one line, with the path of its traceback."""
    log = write_log(error)
    place = "could not be written to a file" if log is None else f"is in {log}"
    return CrashError(f"{_reason(error)}; the traceback {place}")


def _reason(error: Exception) -> str:
    first = " ".join(str(error).split())[:_LONGEST_REASON]
    if _is_out_of_memory(error):
        detail = f" ({first})" if first else ""
        return f"memory ran out{detail}: lower batch_size, shorten the texts or free memory"
    if isinstance(error, OSError) and error.errno in FULL:
        return f"the disk is full ({first}): free space and run again"
    name = type(error).__name__
    return f"the command could not be completed: {name}: {first}" if first else f"{name} was raised"


def _is_out_of_memory(error: Exception) -> bool:
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(mark in str(error) for mark in _NO_MEMORY)


def write_log(error: Exception) -> Path | None:
    """Write the traceback to the cache directory or the temporary directory; return its path."""
    name = time.strftime("paceline-%Y%m%d-%H%M%S-")
    system = f"Python {platform.python_version()}, {platform.platform()}"
    trace = "".join(traceback.format_exception(error))
    words = (masked(word) if "://" in word else word for word in sys.argv[1:])
    command = shlex.join(["paceline", *words])
    text = f"paceline {paceline.__version__}, {system}\n{command}\n{trace}"
    for folder in (functools.partial(cache_directory, "logs"), tempfile.gettempdir):
        with contextlib.suppress(Exception):  # a report of a crash may not crash
            handle, log = tempfile.mkstemp(".log", name, folder())
            with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as stream:
                stream.write(text)
            return Path(log)
    return None
