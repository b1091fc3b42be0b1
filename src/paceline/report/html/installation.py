"""Checks for the libraries of HTML reports before a long command starts."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from paceline.errors import StorageError, UsageError

if TYPE_CHECKING:
    from pathlib import Path

_LIBRARIES = ("altair", "vl_convert", "jinja2")


def require(file: Path | None = None) -> None:
    """Check that an HTML report can be written, to `file` if it is given.

    Raises:
        UsageError: a library is not installed.
        StorageError: the file is a directory.
    """
    missing = [name for name in _LIBRARIES if find_spec(name) is None]
    if missing:
        raise UsageError(
            f"HTML reports need {', '.join(missing)}; install with: pip install 'paceline[report]'"
        )
    if file is not None and file.is_dir():
        raise StorageError(f"--html: {file} is a directory; name a file, such as report.html")
