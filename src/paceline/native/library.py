"""Load the C library of paceline-kernels, or compile it here."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import platform
import subprocess
import tempfile
import warnings
from pathlib import Path

from paceline.cache import cache_directory
from paceline.compilation import (
    compile_command,
    compiler,
    digest,
    kernels_folder,
    kernels_library,
)
from paceline.errors import SlowerWarning
from paceline.processor import compile_flags, level, processor_flags
from paceline.records import storage_errors
from paceline.version import __version__

_LETTERS = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "f": ctypes.c_float, "d": ctypes.c_double}
# Types of the arguments and of the result, as letters of _LETTERS.
_FUNCTIONS = {
    "read_tokens": ("pp", ""),
    "draw_ahead": ("ppp", "i"),
    "verify_ahead": ("pppdp", "i"),
    "workspace_size": ("piii", "i"),
    "most_tokens": ("i", "i"),
    "packed_size": ("iii", "i"),
    "pack": ("piiip", ""),
    "best_tokens": ("piiip", ""),
    "softmax": ("piiifip", ""),
    "keep_top_p": ("piifi", "i"),
    "draw_tokens": ("ppiiip", ""),
    "verify": ("pi", ""),
    "losses_and_slopes": ("pi", "i"),
}


def library_with(flags: tuple[str, ...]) -> ctypes.CDLL:
    """The library, compiled here with these additional flags; from the cache, if it is there."""
    name, cache = f"{_key(flags)}.so", cache_directory("native")
    with contextlib.suppress(OSError, AttributeError):  # none is there, or it is damaged
        return _load(cache / name)
    with contextlib.ExitStack() as stack:
        with storage_errors(cache / name):
            scratch = stack.enter_context(tempfile.TemporaryDirectory(dir=cache))
        made = Path(scratch) / name
        command = compile_command(flags, made)
        subprocess.run(command, check=True, capture_output=True, timeout=120)
        made.chmod(0o700)  # whatever the umask
        library = _load(made)
        made.replace(cache / name)
    return library


def _load(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    for name, (arguments, result) in _FUNCTIONS.items():
        function = library[name]
        function.argtypes = [_LETTERS[letter] for letter in arguments]
        function.restype = _LETTERS.get(result)
        setattr(library, name, function)
    return library


def _key(flags: tuple[str, ...]) -> str:
    """Hash of what the library depends on."""
    return digest(compiler(), *flags, platform.machine(), *sorted(processor_flags()))


@functools.cache
def compiled() -> ctypes.CDLL | None:
    """The library for the processor's level; None, with one warning, if there is none."""
    ahead = kernels_library(level())  # of paceline-kernels, if it has these sources
    try:
        return library_with(compile_flags(level())) if ahead is None else _load(ahead)
    except (OSError, AttributeError, subprocess.SubprocessError) as error:
        warnings.warn(
            f"there is no compiled C library ({_reason(error)}), so PyTorch is used instead: a "
            "token takes about eight times as long to decode and speculation does not pay; "
            f"install paceline-kernels {__version__}, or install a C compiler with OpenMP such as "
            "gcc 12 or later, or name one in CC",
            SlowerWarning,
            stacklevel=2,
        )
        return None


def library_in_use() -> str | None:
    """Where the library in use comes from, and its level; None if PyTorch is used instead."""
    loaded = compiled()
    if loaded is None:
        return None
    ahead = Path(loaded._name).parent == kernels_folder()
    return f"{'paceline-kernels' if ahead else 'compiled here'}, level {level()}"


def library() -> ctypes.CDLL:
    """The library, for callers that have tested `compiled`."""
    found = compiled()
    assert found is not None, "no compiled library: call can_draw or can_differentiate first"
    return found


def _reason(error: Exception) -> str:
    """The first line of the compiler's message that names an error, or that of the system."""
    text = str(error)
    if isinstance(error, subprocess.CalledProcessError):
        text = error.stderr.decode(errors="replace").strip() or text
    lines = text.splitlines()
    return next((line for line in lines if "error: " in line), lines[0])
