"""Short hashes, of text and of files by a part of their content."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

_ENDS = 1 << 20  # bytes hashed at the start and at the end of a file


def short_hash(parts: Iterable[str | bytes]) -> str:
    """SHA-256 of the parts one after the other, 16 hexadecimal digits."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode() if isinstance(part, str) else part)
    return digest.hexdigest()[:16]


def files_fingerprint(files: Iterable[Path]) -> str:
    """Hash of the files' names, sizes, first bytes and last bytes."""
    return short_hash(part for file in files for part in _parts(file))


def _parts(file: Path) -> Iterator[str | bytes]:
    size = file.stat().st_size
    yield f"{file.name} {size}\n"
    with file.open("rb") as stream:
        yield stream.read(_ENDS)
        stream.seek(max(0, size - _ENDS))
        yield stream.read()
