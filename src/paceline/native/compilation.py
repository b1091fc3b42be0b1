"""Compile the C sources into one library for this machine."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from paceline.processor import processor_flags
from paceline.records import cache_root, storage_errors

_HERE = Path(__file__).parent
_LETTERS = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "f": ctypes.c_float, "d": ctypes.c_double}
# Types of the arguments and of the result, as letters of _LETTERS.
_FUNCTIONS = {
    "read_tokens": ("pp", ""),
    "draw_ahead": ("ppp", "i"),
    "judge_ahead": ("pppdp", "i"),
    "workspace_size": ("piii", "i"),
    "most_tokens": ("i", "i"),
    "packed_size": ("iii", "i"),
    "pack": ("piiip", ""),
    "best_tokens": ("piiip", ""),
    "softmax": ("piiifip", ""),
    "keep_top_p": ("piifi", "i"),
    "draw_tokens": ("ppiiip", ""),
    "judge": ("pi", ""),
    "losses_and_slopes": ("pi", ""),
    "num_facts": ("", "i"),
    "fact_name": ("i", "p"),
    "fact_value": ("i", "i"),
}

_OPTIMISATION = ("-O3", "-march=native", "-fno-math-errno", "-fopenmp")
_FLAGS = (*_OPTIMISATION, "-shared", "-fPIC", "-Wl,-Bsymbolic")


def library_with(flags: tuple[str, ...]) -> ctypes.CDLL:
    """Load the library, compiled with these additional flags."""
    library = ctypes.CDLL(str(_built(flags)))
    for name, (arguments, result) in _FUNCTIONS.items():
        function = library[name]
        function.argtypes = [_LETTERS[letter] for letter in arguments]
        function.restype = _LETTERS.get(result)
        setattr(library, name, function)
    return library


def _built(flags: tuple[str, ...] = ()) -> Path:
    """Path of the library in the cache; compiles it atomically if it is missing.

    Raises:
        StorageError: the cache cannot be written.
        OSError: the compiler cannot be started.
        SubprocessError: it fails.
    """
    texts = [path.read_text(encoding="utf-8") for path in sorted(_HERE.glob("*.[ch]"))]
    compiler = os.environ.get("CC") or shutil.which("cc") or "gcc"
    facts = (*texts, compiler, *_FLAGS, *flags, platform.machine(), *sorted(processor_flags()))
    key = hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]
    entry = cache_root() / "native" / f"{key}.so"
    if not entry.exists():
        with contextlib.ExitStack() as stack:
            with storage_errors(entry):
                entry.parent.mkdir(parents=True, exist_ok=True)
                folder = stack.enter_context(tempfile.TemporaryDirectory(dir=entry.parent))
            made = Path(folder) / entry.name
            sources = map(str, sorted(_HERE.glob("*.c")))
            command = [compiler, *_FLAGS, *flags, *sources, "-o", str(made), "-lm"]
            subprocess.run(command, check=True, capture_output=True, timeout=120)
            made.replace(entry)
    return entry
