"""The kind of a run by its files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.errors import UsageError
from paceline.records import RunDirectory

if TYPE_CHECKING:
    from pathlib import Path


def is_bench(path: Path) -> bool:
    """Whether the path is a bench's, the only run with a Markdown report."""
    manifest = read_manifest(path) if path.is_dir() else None
    if manifest is not None and "kind" in manifest:
        return manifest["kind"] == "Bench"
    # without a kind: an early bench, or a path that does not exist, which a bench reports
    return not (path.is_file() or (path / "rows.jsonl").exists() or (path / "sweep.json").exists())


def read_manifest(path: Path) -> dict[str, Any] | None:
    """The manifest of a run directory; None without one.

    Raises:
        UsageError: it is not JSON.
    """
    try:
        return RunDirectory(path).read_manifest()
    except ValueError:
        raise UsageError(f"{path / 'manifest.json'} is not JSON; run the command again") from None
