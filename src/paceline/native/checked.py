"""The compiled library for this processor, checked once before its first use."""

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
    """The library for the processor's level; None, with one warning, if there is none that is right."""
    try:
        library = library_with(compile_flags(level()))
    except (OSError, subprocess.SubprocessError) as error:
        _warn(
            f"the C sources could not be compiled ({_reason(error)})",
            "install a C compiler with OpenMP such as gcc, or name one in CC",
        )
        return None
    fault = fault_of(library)
    if fault is not None:
        _warn(
            f"the compiled library gives other results than PyTorch ({fault})",
            "try another C compiler in CC, and report this with the output of paceline env",
        )
        return None
    return library


def _warn(fault: str, advice: str) -> None:
    warnings.warn(
        f"{fault}, so PyTorch computes everything: a decoded token takes about 3.5 times as long; "
        f"{advice}",
        SlowerWarning,
        stacklevel=3,
    )


def _reason(error: Exception) -> str:
    """One line of what the compiler or the system said."""
    if isinstance(error, subprocess.CalledProcessError):
        said = error.stderr.decode(errors="replace").strip().splitlines()
        return said[0] if said else f"the compiler ended with exit code {error.returncode}"
    return str(error).strip().split("\n")[0]
