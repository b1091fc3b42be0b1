"""The cache directory, which this user alone may write: it holds programs, too."""

from __future__ import annotations

import shutil
from contextlib import suppress
from typing import TYPE_CHECKING

from filelock import FileLock

from paceline.errors import StorageError
from paceline.records import atomic_directory, atomic_write_text, cache_root, storage_errors

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def cache_directory(kind: str) -> Path:
    """The directory of this kind in the cache; created if needed, for this user alone.

    Raises:
        StorageError: it cannot be created.
    """
    folder = cache_root() / kind
    with storage_errors(folder):
        for place in (folder.parent, folder):
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def cached_text(kind: str, name: str) -> str | None:
    """A text file of the cache; None if there is none."""
    with suppress(OSError, ValueError):
        return (cache_directory(kind) / name).read_text("utf-8")
    return None


def keep_text(kind: str, name: str, text: str) -> None:
    """Write a text file of the cache; a cache that cannot be written is no error."""
    with suppress(StorageError):
        atomic_write_text(cache_directory(kind) / name, text)


def cached_directory(kind: str, name: str, fill: Callable[[Path], None]) -> Path:
    """A model directory in the cache, such as a converted GGUF file; `fill` makes it, once.

    One process at a time calls `fill`. Entries appear whole or not at all.

    Raises:
        StorageError: The disk is too full, or the cache cannot be written.
        PacelineError: As `fill`.
    """
    entry = cache_directory(kind) / name
    if entry.exists():
        return entry
    with storage_errors(entry), FileLock(f"{entry}.lock"):
        if not entry.exists():
            # under the lock, existing scratch directories belong to killed runs
            for stale in entry.parent.glob(f".{name}.*"):
                shutil.rmtree(stale, ignore_errors=True)
            with atomic_directory(entry) as scratch:
                fill(scratch)
    return entry
