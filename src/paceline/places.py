"""Files that come with Paceline; where links of other people lead; names that become paths."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import AfterValidator

from paceline.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable

SHIPPED = Path(__file__).parent / "shipped"
"""Files of the repository at their paths in it: links in the sources, and files in a wheel."""
TEMPLATES = "additional_chat_templates"
"""The directory beside a tokenizer with chat templates other than its first."""
_LONGEST = 200  # bytes of a name; a file system allows 255, and suffixes are added


def _one_part(name: str) -> str:
    if "/" in name or name.startswith(".") or not name.isprintable() or not name.strip():
        raise ValueError("is not the name of a file; leave out /, a dot at its start, and controls")
    if len(name.encode()) > _LONGEST:
        raise ValueError(f"is longer than {_LONGEST} bytes; give it a shorter name")
    return name


PathPart = Annotated[str, AfterValidator(_one_part)]
"""A name in a configuration that becomes the name of a file or directory."""


def shipped(path: Path) -> Path:
    """The path; if there is nothing here, the file at this path that comes with Paceline.

    These are `configs/`, so that commands of the guides need no clone.
    """
    own = SHIPPED / path
    return own if not path.exists() and own.exists() else path


def leads_out(path: Path, folder: Path) -> bool:
    """True if a path below a folder leads out of it by a link.

    Files of the hub's cache are links from `snapshots/COMMIT` to `blobs`, and lead not out.
    """
    place, inside = path.resolve(), folder.resolve()
    commits = (one.parent for one in (inside, *inside.parents) if one.parent.name == "snapshots")
    blobs = [one.parent / "blobs" for one in commits]
    return not place.is_relative_to(inside) and place.parent not in blobs


def refuse_link_out(path: Path, folder: Path, advice: str = "put the file in its place") -> None:
    """Raise a UsageError if the path leads out of the folder by a link."""
    if leads_out(path, folder):
        raise UsageError(f"{path} is a link out of {folder}; {advice}")


def refuse_links_out(folder: Path, advice: str = "remove it, or choose another output") -> None:
    """Raise a ConfigError if a link in the folder leads out of it."""
    inside = folder.resolve()
    for place, folders, files in os.walk(folder):
        for path in (Path(place, name) for name in (*folders, *files)):
            if path.is_symlink() and not path.resolve().is_relative_to(inside):
                raise ConfigError(f"{path} is a link out of {folder}; {advice}")


def copy_files(files: Iterable[Path], out: Path) -> None:
    """Copy files into a directory, and of directories only `TEMPLATES`.

    Raises a UsageError for links out of the directory of a file.

    A copy may be published, and the author of a link may not have read access to its target.
    """
    for path in files:
        if path.is_file():
            refuse_link_out(path, path.parent)
            shutil.copyfile(path, out / path.name)
        elif path.name == TEMPLATES:
            refuse_link_out(path, path.parent)
            (out / path.name).mkdir(exist_ok=True)
            copy_files(path.iterdir(), out / path.name)
