"""The kind of a run by its files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.records import RunDirectory

if TYPE_CHECKING:
    from pathlib import Path


def is_bench(path: Path) -> bool:
    """Whether the path is the directory of a bench, the only run with a Markdown report."""
    manifest = RunDirectory(path).read_manifest()
    if manifest is not None and "kind" in manifest:
        return manifest["kind"] == "Bench"
    return (path / "results.jsonl").exists()  # of an early bench, without a kind
