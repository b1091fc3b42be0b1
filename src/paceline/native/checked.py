"""Compile the library for this processor and check it before its first use."""

from __future__ import annotations

import functools
import subprocess
import warnings
from typing import TYPE_CHECKING

from paceline.errors import SlowerWarning
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
    except (OSError, subprocess.SubprocessError) as error:
        _warn(
            f"the C sources could not be compiled ({_reason(error)})",
            "install a C compiler with OpenMP such as gcc, or name one in CC",
        )
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


def _reason(error: Exception) -> str:
    """The first line of the compiler's or the system's message."""
    if isinstance(error, subprocess.CalledProcessError):
        lines = error.stderr.decode(errors="replace").strip().splitlines()
        return lines[0] if lines else f"the compiler ended with exit code {error.returncode}"
    return str(error).strip().split("\n")[0]
