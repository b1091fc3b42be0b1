"""Checks that an output path can be written, before a long command starts."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from paceline.errors import StorageError, UsageError
from paceline.records import storage_errors


def check_output_directory(path: Path, num_bytes: int = 0, name: str = "output") -> int:
    """Check write access and free space; returns the free bytes. `name` is used in messages.

    Raises:
        UsageError: the path, or a part of it, is a file.
        StorageError: it cannot be written, or has less than `num_bytes` free.
    """
    if path.is_file():
        raise UsageError(f"{name} {path} is a file; choose a directory")
    free = _free_above(path, name, path)
    if free < num_bytes:
        raise StorageError(
            f"{name} {path} needs about {size_in_words(num_bytes)}, but only "
            f"{size_in_words(free)} are free; free space or choose another path"
        )
    return free


def check_output_file(path: Path, name: str = "output") -> int:
    """Check that a file can be written; returns the free bytes.

    Raises:
        UsageError: the path is a directory or a device, or a part of it is a file.
        StorageError: it cannot be written.
    """
    if path.is_dir():
        raise UsageError(f"{name} {path} is a directory; name a file")
    if path.exists() and not path.is_file():
        raise UsageError(f"{name} {path} is not a regular file; name another")
    return _free_above(path.parent, name, path)


def _free_above(folder: Path, name: str, path: Path) -> int:
    """Free bytes in the nearest existing directory, in which a new entry can be made."""
    with storage_errors(path):
        while not folder.exists():
            folder = folder.parent
        if not folder.is_dir():
            raise UsageError(
                f"{name} {path} cannot be created: {folder} is a file; choose another path"
            )
        Path(tempfile.mkdtemp(dir=folder, prefix=".paceline-")).rmdir()
        return shutil.disk_usage(folder).free


def size_in_words(num_bytes: float) -> str:
    """Such as 1.5 GB."""
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes / 1e3:.1f} kB"
