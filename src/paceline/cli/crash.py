"""The last net: whatever a command raises leaves the program as one line and exit code 3.

A traceback would end the program with exit code 1, which means NO-GO. It goes to a log file instead.
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
from paceline.errors import INTERRUPTED, CrashError, PacelineError
from paceline.records import cache_root

if TYPE_CHECKING:
    from collections.abc import Callable

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
# How torch and CUDA say on the way out of memory that they are: not by a class of their own.
_NO_MEMORY = ("can't allocate memory", "not enough memory", "out of memory", "std::bad_alloc")
_LONGEST_REASON = 300


def guarded(command: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """The command, which raises nothing but what `main` knows how to report."""

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
    """One line for a fault that nobody expected, with the place of its traceback."""
    return CrashError(f"{_reason(error)}; {_where(write_log(error))}")


def _reason(error: Exception) -> str:
    first = " ".join(str(error).split())[:_LONGEST_REASON]
    if _is_out_of_memory(error):
        detail = f" ({first})" if first else ""
        return f"memory ran out{detail}: lower batch_size, shorten the texts or free some memory"
    if isinstance(error, OSError) and error.errno in _FULL:
        return f"the disk is full ({first}): free some space and run again"
    name = type(error).__name__
    return f"the command could not be completed: {name}: {first}" if first else f"{name} was raised"


def _is_out_of_memory(error: Exception) -> bool:
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(mark in str(error) for mark in _NO_MEMORY)


def _where(log: Path | None) -> str:
    if log is None:
        return "the traceback could not be written to a file"
    return f"the traceback is in {log}"


def write_log(error: Exception) -> Path | None:
    """The traceback in a file of its own: in the cache directory, else where temporary files go."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    name = f"paceline-{stamp}-{os.getpid()}.log"
    text = "\n".join(
        (
            f"paceline {paceline.__version__}, Python {platform.python_version()}, {platform.platform()}",
            shlex.join(sys.argv),
            "".join(traceback.format_exception(error)),
        )
    )
    for folder in (cache_root() / "logs", Path(tempfile.gettempdir())):
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text, encoding="utf-8", errors="backslashreplace")
            return folder / name
    return None
