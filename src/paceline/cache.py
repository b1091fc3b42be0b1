"""The cache directory, from which only files of this user are used: it holds programs, too."""

from __future__ import annotations

import functools
import os
import shutil
import warnings
from contextlib import suppress
from typing import TYPE_CHECKING

from filelock import FileLock

from paceline.errors import StorageError
from paceline.records import atomic_directory, atomic_write_text, cache_root, storage_errors

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def cache_directory(kind: str) -> Path | None:
    """The directory of this kind in the cache; created if needed, for this user alone.

    None, with one warning, if another user owns it or may write to it.

    Raises:
        StorageError: it cannot be created.
    """
    root = cache_root()
    folder = root / kind
    with storage_errors(folder):
        root.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        for place in (root, folder):
            place.mkdir(mode=0o700, exist_ok=True)
    if is_own(root) and is_own(folder):
        return folder
    _warn(root)
    return None


def is_own(path: Path) -> bool:
    """True if the path belongs to this user, and no other may write to it."""
    status = path.stat()
    return status.st_uid == os.getuid() and not status.st_mode & 0o022


@functools.cache
def _warn(root: Path) -> None:
    warnings.warn(
        f"the cache {root} is not used, because other users own it or may write to it; set "
        f"PACELINE_CACHE to a directory of your own, or run chmod -R go-w {root}",
        stacklevel=3,
    )


def cached_text(kind: str, name: str) -> str | None:
    """A text file of the cache; None if there is none, or if other users may have written it."""
    with suppress(OSError, ValueError):
        folder = cache_directory(kind)
        if folder is not None and is_own(folder / name):
            return (folder / name).read_text("utf-8")
    return None


def keep_text(kind: str, name: str, text: str) -> None:
    """Write a text file of the cache; a cache that cannot be written is no error."""
    with suppress(StorageError):
        folder = cache_directory(kind)
        if folder is not None:
            atomic_write_text(folder / name, text, 0o600)


def cached_directory(kind: str, name: str, fill: Callable[[Path], None]) -> Path:
    """A model directory in the cache, such as a converted GGUF file; `fill` makes it, once.

    One process at a time calls `fill`. Entries appear whole or not at all.

    Raises:
        StorageError: The disk is too full, or the cache cannot be written, or others may write it.
        PacelineError: As `fill`.
    """
    folder = cache_directory(kind)
    if folder is None:
        raise StorageError(
            f"the converted model has no place: other users own {cache_root()} or may write to it; "
            "set PACELINE_CACHE to a directory of your own"
        )
    entry = folder / name
    if entry.exists():
        if not all(map(is_own, (entry, *entry.rglob("*")))):
            raise StorageError(
                f"other users own {entry} or may write to it, so it is not loaded; remove it, and "
                "the model is converted again"
            )
        return entry
    with storage_errors(entry), FileLock(f"{entry}.lock", mode=0o600):
        if not entry.exists():
            # under the lock, existing scratch directories belong to killed runs
            for stale in folder.glob(f".{name}.*"):
                shutil.rmtree(stale, ignore_errors=True)
            with atomic_directory(entry) as scratch:
                fill(scratch)
                for made in (scratch, *scratch.rglob("*")):  # whatever the umask
                    made.chmod(made.stat().st_mode & ~0o022)
    return entry


def is_cached(kind: str, name: str) -> bool:
    """Whether `cached_directory` would find this entry."""
    with suppress(StorageError):
        folder = cache_directory(kind)
        return folder is not None and (folder / name).exists()
    return False
