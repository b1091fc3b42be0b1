"""How the C sources are compiled: on first use, or ahead of time into paceline-kernels.

The build of paceline-kernels imports this module, so it uses the standard library alone.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
from pathlib import Path

from paceline.processor import compile_flags

SOURCES = Path(__file__).parent / "native"
_OPTIONS = ("-O3", "-fno-math-errno", "-fopenmp", "-shared", "-fPIC", "-Wl,-Bsymbolic")


def compiler() -> str:
    """The C compiler: `CC`, or cc, or gcc."""
    return os.environ.get("CC") or shutil.which("cc") or "gcc"


def compile_command(flags: tuple[str, ...], target: Path) -> list[str]:
    """The command that compiles all sources into one library."""
    sources = map(str, sorted(SOURCES.glob("*.c")))
    name = compiler()
    words = [name] if shutil.which(name) else name.split()  # CC="ccache gcc"
    return [*words, *_OPTIONS, *flags, *sources, "-o", str(target), "-lm"]


def digest(*facts: str) -> str:
    """Hash of the sources, the options and these facts."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(SOURCES.glob("*.[ch]"))]
    return hashlib.sha256("\n".join([*texts, *_OPTIONS, *facts]).encode()).hexdigest()[:16]


def library_name(level: str) -> str:
    """File of paceline-kernels for a level; a wheel of other sources has none of this name."""
    return f"{level}-{digest(*compile_flags(level))}.so"


def kernels_folder() -> Path | None:
    """Where paceline-kernels is installed; None if it is not. Does not import it."""
    found = importlib.util.find_spec("paceline_kernels")
    return None if found is None or found.origin is None else Path(found.origin).parent


def kernels_library(level: str) -> Path | None:
    """The library of paceline-kernels that was compiled from these sources for a level, if any."""
    folder = kernels_folder()
    path = None if folder is None else folder / library_name(level)
    return path if path is not None and path.exists() else None
