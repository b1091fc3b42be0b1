"""Compile the library for this processor and check it before its first use."""

from __future__ import annotations

import errno
import functools
import os
import subprocess
import warnings
from typing import TYPE_CHECKING

from paceline.errors import SlowerWarning, StorageError
from paceline.native.compilation import library_with
from paceline.native.self_check import fault_of
from paceline.processor import compile_flags, level

if TYPE_CHECKING:
    import ctypes


@functools.cache
def compiled() -> ctypes.CDLL | None:
    """The library for the processor's level; None, with one warning, if it cannot be used."""
    try:
        found = library_with(compile_flags(level()))
    except (OSError, AttributeError, subprocess.SubprocessError) as error:
        _warn(f"the C sources could not be compiled ({_reason(error)})", _advice(error))
        return None
    fault = fault_of(found)
    if fault is not None:
        _warn(
            f"the compiled library gives other results than PyTorch ({fault})",
            "try another C compiler in CC, and report this with the output of paceline env",
        )
        return None
    return found


def library() -> ctypes.CDLL:
    """The library, for callers that have tested `compiled`."""
    found = compiled()
    assert found is not None, "no compiled library: call can_draw or can_differentiate first"
    return found


def _warn(fault: str, advice: str) -> None:
    warnings.warn(
        f"{fault}, so PyTorch is used instead: a token takes about 3.5 times as long to decode; "
        f"{advice}",
        SlowerWarning,
        stacklevel=3,
    )


def _advice(error: Exception) -> str:
    if isinstance(error, StorageError):
        return "set PACELINE_CACHE to a directory that can be written"
    if os.strerror(errno.ENOSPC) in _message(error):
        return "free space, or set PACELINE_CACHE and TMPDIR to directories with space"
    return "install a C compiler with OpenMP such as gcc, or name one in CC"


def _reason(error: Exception) -> str:
    """The first line of the compiler's or the system's message."""
    lines = _message(error).strip().splitlines()
    if not lines and isinstance(error, subprocess.CalledProcessError):
        return f"the compiler ended with exit code {error.returncode}"
    return lines[0] if lines else type(error).__name__


def _message(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        return error.stderr.decode(errors="replace")
    return str(error.__cause__ if isinstance(error, StorageError) else error)
