"""Read and write files: atomic files and directories, JSON lines, run directories.

Files are written under a temporary name and renamed, so readers never see a partial file.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import json
import os
import secrets
import shutil
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from filelock import FileLock, Timeout

from paceline.config import read_json_mapping
from paceline.environment import begin, environment
from paceline.errors import ConfigError, PacelineError, PromptError, StorageError, UsageError
from paceline.fingerprints import short_hash
from paceline.places import neighbour

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from paceline.config import StrictModel

SCHEMA_VERSION: Final = 1
"""Of all result rows and files; it increases when a field changes its meaning."""
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
"""Numbers of errors that mean a full disk."""


@contextlib.contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turn a full disk or an unwritable path into a one-line StorageError."""
    try:
        yield
    except (PacelineError, BlockingIOError):
        raise
    except Exception as error:
        code = error.errno if isinstance(error, OSError) else None
        # Libraries wrap the operating system's error in their own exceptions: search the text, too.
        full = code in FULL or any(os.strerror(number) in str(error) for number in FULL)
        if not full and code is None:
            raise
        detail = " ".join(str(error).split())
        reason = "the disk is full" if full else f"it cannot be written ({detail})"
        advice = "free some space" if full else "choose another path"
        raise StorageError(
            f"could not write {path}: {reason}; earlier files are intact: {advice} and run again"
        ) from error


def cache_root() -> Path:
    """The cache directory: $PACELINE_CACHE, or ~/.cache/paceline."""
    return Path(os.environ.get("PACELINE_CACHE") or "~/.cache/paceline").expanduser()


def atomic_write_text(path: Path, text: str) -> None:
    """Write a text file in UTF-8 as `atomic_write_bytes` does, with its errors."""
    atomic_write_bytes(path, text.encode())


def atomic_write_bytes(path: Path, content: bytes) -> None:
    """Write a file atomically; create parent directories.

    Raises:
        StorageError: the disk is full, or the path is not writable or not a regular file.
    """
    with storage_errors(path):
        if path.exists() and not path.is_file():  # such as /dev/null
            raise FileExistsError(errno.EEXIST, "not a regular file", str(path))
        path.parent.mkdir(parents=True, exist_ok=True)
        name = path.parent / f".{path.name}.{secrets.token_hex(4)}"
        try:
            with name.open("xb") as stream:
                stream.write(content)
                stream.flush()
                os.fsync(stream.fileno())
            name.replace(path)
        except BaseException:
            name.unlink(missing_ok=True)
            raise


@contextlib.contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """Yield a scratch directory that replaces `path` if the block succeeds.

    On any error the scratch directory is removed and an existing `path` is unchanged.
    """
    with storage_errors(path):
        if path.exists() and not path.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "not a directory", str(path))
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.parent / f".{path.name}.{secrets.token_hex(4)}"
        scratch.mkdir()
        try:
            yield scratch
            _flush(scratch)
            if path.exists():
                old = scratch.with_name(f"{scratch.name}.old")
                old.mkdir()
                path.replace(old / "was")
                try:
                    scratch.replace(path)
                except BaseException:
                    (old / "was").replace(path)
                    old.rmdir()
                    raise
                shutil.rmtree(old, ignore_errors=True)
            else:
                scratch.replace(path)
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)
            raise


def _flush(folder: Path) -> None:
    """Write all files below a directory through to the disk, so that a power cut loses none."""
    for path in [one for one in folder.rglob("*") if one.is_file()]:
        with path.open("rb") as stream:
            os.fsync(stream.fileno())


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold an exclusive lock on a directory, which is created; released if the process dies.

    Raises:
        BlockingIOError: another process holds the lock.
        StorageError: the directory cannot be created, or its file system has no locks.
    """
    lock = FileLock(directory / ".lock", blocking=False, thread_local=False)
    with storage_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire()
        except Timeout:
            raise BlockingIOError from None
    try:
        yield
    finally:
        lock.release()


def append_jsonl(path: Path, row: dict[str, Any]) -> None:
    """Append one row as a JSON line; create the file if needed."""
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        _mend_last_line(path)
        with path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(row) + "\n")


def _mend_last_line(path: Path) -> None:
    """Remove a partial last line, so that the next row does not join it."""
    if not path.exists() or path.stat().st_size == 0:
        return
    with path.open("rb+") as stream:
        stream.seek(-1, os.SEEK_END)
        if stream.read(1) == b"\n":
            return
        stream.seek(0)
        whole, _, torn = stream.read().rpartition(b"\n")
        try:
            json.loads(torn)
            stream.write(b"\n")
        except ValueError:
            stream.truncate(len(whole) + 1 if whole else 0)


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Read rows, without a partial last line of a killed process.

    Raises:
        UsageError: another line is not a JSON object.
    """
    if not path.exists():
        return []
    rows: list[dict[str, Any]] = []
    lines = path.read_text(encoding="utf-8", errors="surrogateescape").split("\n")
    for number, line in enumerate(lines):
        if not line:
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            if number == len(lines) - 1:
                continue
            row = None
        if not isinstance(row, dict):
            raise UsageError(f"{path} line {number + 1} is not a JSON object; remove it")
        rows.append(cast("dict[str, Any]", row))
    return rows


def read_lines(path: Path) -> Iterator[tuple[str, str]]:
    """Lines that are not blank, with their locations. Files that end in `.gz` are decompressed.

    Raises:
        PromptError: they are not UTF-8, or the file cannot be read.
    """
    if not path.exists():
        raise PromptError(f"no file at {path}; check the path{neighbour(path)}")
    try:
        opened = gzip.open if path.suffix.lower() == ".gz" else open
        with opened(path, "rb") as stream:
            for number, raw in enumerate(stream, 1):
                where = f"{path} line {number}"
                try:
                    # Only the first line can have a byte order mark.
                    line = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                except UnicodeDecodeError:
                    raise PromptError(f"{where} is not UTF-8; convert the file to UTF-8") from None
                if line:
                    yield line, where
    except (OSError, EOFError, zlib.error) as error:  # the last two: a damaged .gz
        reason = getattr(error, "strerror", None) or error
        raise PromptError(f"cannot read {path}: {reason}; name a text file") from None


def flattened(
    values: Mapping[str, Any], without: Collection[str] = (), between: str = ".", prefix: str = ""
) -> dict[str, Any]:
    """Nested values by their joined names, without these names and what is in them."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        key = prefix + name
        if key in without:
            continue
        if isinstance(value, dict) and value:
            found |= flattened(value, without, between, key + between)
        else:
            found[key] = value
    return found


def config_hash(config: StrictModel) -> str:
    """Short hash of the resolved configuration."""
    return short_hash([json.dumps(config.model_dump(mode="json"), sort_keys=True)])


def _kind(config: StrictModel) -> str:
    return type(config).__name__.removesuffix("Config")


def is_run(manifest: Mapping[str, Any]) -> bool:
    """True for the manifest of a run; other programs write a manifest.json, too."""
    kinds: dict[str, type] = {"config": dict, "config_hash": str, "kind": str}
    return all(isinstance(manifest.get(key), kind) for key, kind in kinds.items())


class RunDirectory:
    """Paths and files of one run: manifest.json, metrics.jsonl, checkpoints/, result.json."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest = path / "manifest.json"
        self.metrics = path / "metrics.jsonl"
        self.checkpoints = path / "checkpoints"
        self.result = path / "result.json"
        self.resumed: dict[str, Any] | None = None  # the manifest that `check` returned

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Begin or resume the run in its locked directory; a lock is released if its owner dies.

        Raises:
            ConfigError: another process is writing the run.
            StorageError: the directory cannot be created.
        """
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(locked(self.path))
            except BlockingIOError:
                raise ConfigError(
                    f"output {self.path} is being written by another process; wait for it, or "
                    "choose another output"
                ) from None
            stack.enter_context(begin(self.resumed))
            yield

    def write_manifest(self, config: StrictModel, **more: str | dict[str, Any]) -> None:
        """Record the resolved configuration, its hash, the environment and further entries."""
        content = more | {
            "kind": _kind(config),
            "config": config.model_dump(mode="json"),
            "config_hash": config_hash(config),
            "environment": environment(),
        }
        atomic_write_text(self.manifest, json.dumps(content, indent=2) + "\n")

    def keep_choice(self, name: str, choose: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the choice recorded in the manifest, or call `choose` and record its result."""
        manifest = self.read_manifest() or {}
        choices = manifest.setdefault("choices", {})
        if name not in choices:
            choices[name] = choose()
            atomic_write_text(self.manifest, json.dumps(manifest, indent=2) + "\n")
        return choices[name]

    def check(
        self,
        config: StrictModel,
        *,
        begun: bool,
        resume: bool,
        may_change: Collection[str],
        inputs: Mapping[str, str] | None = None,
    ) -> dict[str, Any] | None:
        """Check that this run may write here. -> the manifest of the run to resume, or None.

        A run that has not begun may be replaced by another configuration of the same kind.

        Args:
            config: Configuration of this run.
            begun: True if an earlier start wrote more than its manifest.
            resume: True to resume that run.
            may_change: Keys whose values may differ from the earlier run's, such as `data.path`.
            inputs: Fingerprints of the run's inputs by name; empty ones are not compared.

        Raises:
            ConfigError: other files or a run that cannot be resumed are in the directory.
        """
        where = f"output {self.path}"
        manifest = self.check_kind(config)
        if manifest is None or not begun:
            return None
        if not resume:
            raise ConfigError(f"{where} already holds a run; resume it, or choose another output")
        recorded = manifest | manifest.get("inputs", {})
        # where the marks are not given, a later check has them
        marks = manifest.get("inputs", {}) if inputs is None else inputs
        same = [name for name, mark in marks.items() if mark and recorded.get(name) == mark]
        moved = {*same, *(f"{name}.path" for name in same)}
        before = flattened(manifest["config"], may_change)
        now = flattened(config.model_dump(mode="json"), may_change)
        keys = sorted((before.keys() | now.keys()) - moved)
        changed = [k for k in keys if before.get(k) != now.get(k)]
        if changed:
            key = changed[0]
            names = ", ".join(changed[:3])
            names += f" and {len(changed) - 3} more" if len(changed) > 3 else ""
            raise ConfigError(
                f"{where} holds a run with another {names} ({key} was "
                f"{before.get(key)}, is now {now.get(key)}); choose another output or the old "
                "values"
            )
        for name, mark in (inputs or {}).items():
            if mark and recorded.get(name, mark) != mark:
                raise ConfigError(
                    f"{where} holds a run with another {name.replace('_', ' ')}: files "
                    "have changed since it began; restore them, or choose another output"
                )
        self.resumed = manifest
        return manifest

    def check_kind(self, config: StrictModel) -> dict[str, Any] | None:
        """Refuse to overwrite files that are no run of this kind. -> the manifest of that run.

        Raises:
            ConfigError: the directory is a file, or holds other files or a run of another kind.
        """
        where = f"output {self.path}"
        if self.path.exists() and not self.path.is_dir():
            raise ConfigError(f"{where} is a file; choose a new directory")
        manifest = self.read_manifest()
        if manifest is None or not is_run(manifest):
            there = self.path.iterdir() if self.path.exists() else ()
            if any(not path.name.startswith(".") for path in there):
                raise ConfigError(f"{where} is not empty and holds no run; choose another")
        elif manifest["kind"] != _kind(config):
            raise ConfigError(
                f"{where} holds a run of another kind, {manifest['kind']}; choose another output"
            )
        return manifest

    def read_manifest(self) -> dict[str, Any] | None:
        """The manifest, or None if the run has not started; raises ConfigError."""
        return read_json_mapping(self.manifest) if self.manifest.exists() else None

    def write_result(self, result: dict[str, Any]) -> None:
        atomic_write_text(self.result, json.dumps(result, indent=2) + "\n")

    def read_result(self) -> dict[str, Any] | None:
        """The result, or None if the run has not finished; raises ConfigError."""
        return read_json_mapping(self.result) if self.result.exists() else None
