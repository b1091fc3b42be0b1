"""Model directories in the cache that are made once, such as converted GGUF files."""

from __future__ import annotations

import contextlib
import shutil
from typing import TYPE_CHECKING

from filelock import FileLock

from paceline.cache import cache_directory, is_own
from paceline.errors import StorageError
from paceline.records import atomic_directory, cache_root, storage_errors

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def cached_directory(kind: str, name: str, fill: Callable[[Path], None]) -> Path:
    """The directory of this name in the cache; `fill` makes it, in one process at a time.

    The cache is $PACELINE_CACHE, else ~/.cache/paceline. Entries appear whole or not at all.

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
                for made in scratch.rglob("*"):  # whatever the umask
                    made.chmod(made.stat().st_mode & ~0o022)
    return entry


def is_cached(kind: str, name: str) -> bool:
    """Whether `cached_directory` would find this entry."""
    with contextlib.suppress(StorageError):
        folder = cache_directory(kind)
        return folder is not None and (folder / name).exists()
    return False
