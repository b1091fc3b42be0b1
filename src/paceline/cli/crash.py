"""Report unexpected exceptions as one line with exit code 3; 1, of Python, would mean NO-GO."""

from __future__ import annotations

import errno
import functools
import os
import traceback
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import typer

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
    """Describe an unexpected exception in one line; PACELINE_TRACEBACK prints its traceback."""
    if os.environ.get("PACELINE_TRACEBACK"):
        traceback.print_exception(error)
        return CrashError(_reason(error))
    return CrashError(f"{_reason(error)}; PACELINE_TRACEBACK=1 prints the traceback")


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
