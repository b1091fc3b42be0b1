"""The C sources made into one library on this machine, once; None where that cannot be done."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from paceline.records import cache_root

_log = logging.getLogger(__name__)

_HERE = Path(__file__).parent
_LETTERS = {
    "p": ctypes.c_void_p,
    "i": ctypes.c_int64,
    "f": ctypes.c_float,
    "d": ctypes.c_double,
}
# Arguments and result of each function: p pointer, i int64, f float, d double.
_FUNCTIONS = {
    "read_tokens": ("pp", ""),
    "draw_ahead": ("ppp", "i"),
    "judge_ahead": ("pppdp", "i"),
    "workspace_size": ("piii", "i"),
    "most_tokens": ("i", "i"),
    "may_multiply": ("", "i"),
    "packed_size": ("iii", "i"),
    "pack": ("piiip", ""),
    "best_tokens": ("piiip", ""),
    "softmax": ("piiifip", ""),
    "keep_top_p": ("piifi", "i"),
    "draw_tokens": ("ppiiip", ""),
    "judge": ("pi", ""),
    "losses_and_slopes": ("pi", ""),
}

_FLAGS = (
    "-O3",
    "-march=native",
    "-fno-math-errno",
    "-fopenmp",
    "-shared",
    "-fPIC",
    "-Wl,-Bsymbolic",
)
WITHOUT_TILES = ("-mno-amx-tile",)  # the kernel may refuse what the processor has


@functools.cache
def compiled() -> ctypes.CDLL | None:
    """The library; None, and the reason in the log, without a C compiler that knows OpenMP."""
    try:
        library = library_with(())
        if not library.may_multiply():
            library = library_with(WITHOUT_TILES)
    except (OSError, subprocess.SubprocessError) as error:
        _log.info("computing with torch alone, as the C sources could not be compiled: %s", error)
        return None
    return library


def library_with(flags: tuple[str, ...]) -> ctypes.CDLL:
    """The library, made with these flags besides the usual ones."""
    library = ctypes.CDLL(str(_built(flags)))
    for name, (arguments, result) in _FUNCTIONS.items():
        function = library[name]
        function.argtypes = [_LETTERS[letter] for letter in arguments]
        function.restype = _LETTERS.get(result)
        setattr(library, name, function)
    return library


def _built(flags: tuple[str, ...] = ()) -> Path:
    """Compiled for this very processor, and kept; an entry of the cache appears whole or not at all."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(_HERE.glob("*.[ch]"))]
    compiler = os.environ.get("CC") or shutil.which("cc") or "gcc"
    facts = (*texts, compiler, *_FLAGS, *flags, platform.machine(), _instructions())
    key = hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]
    entry = cache_root() / "native" / f"{key}.so"
    if not entry.exists():
        entry.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=entry.parent) as folder:
            made = Path(folder) / entry.name
            command = [
                compiler,
                *_FLAGS,
                *flags,
                *map(str, sorted(_HERE.glob("*.c"))),
                "-o",
                str(made),
                "-lm",
            ]
            subprocess.run(command, check=True, capture_output=True, timeout=120)
            made.replace(entry)
    return entry


def _instructions() -> str:
    """What the processor can do: a cache may be shared by machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
