"""Model directories in the cache that are made once, such as converted GGUF files."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from filelock import FileLock

from paceline.records import atomic_directory, cache_root, storage_errors

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def cached_directory(kind: str, name: str, fill: Callable[[Path], None]) -> Path:
    """The directory of this name in the cache; `fill` makes it, in one process at a time.

    The cache is $PACELINE_CACHE, else ~/.cache/paceline. Entries appear whole or not at all.

    Raises:
        StorageError: The disk is too full, or the cache cannot be written.
        PacelineError: As `fill`.
    """
    entry = cache_root() / kind / name
    if entry.exists():
        return entry
    with storage_errors(entry):
        entry.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{entry}.lock"):
            if not entry.exists():
                # under the lock, existing scratch directories belong to killed runs
                for stale in entry.parent.glob(f".{entry.name}.*"):
                    shutil.rmtree(stale, ignore_errors=True)
                with atomic_directory(entry) as scratch:
                    fill(scratch)
    return entry
