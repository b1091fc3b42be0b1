"""What is written to disk: atomic files and directories, JSON lines, run directories.

A reader never sees half a file: everything is written beside its place and moved there whole.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.environment import environment
from paceline.errors import ConfigError, PacelineError, StorageError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

    from paceline.config import StrictModel

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_ENDS = 1 << 20  # bytes of either end of a file that its fingerprint reads


@contextlib.contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turn a full disk or a place that cannot be written into one clear line.

    Libraries below wrap the operating system's error in exceptions of their own, so the text
    is looked at as well.
    """
    try:
        yield
    except (PacelineError, BlockingIOError):
        raise
    except Exception as error:
        code = error.errno if isinstance(error, OSError) else None
        full = code in _FULL or any(os.strerror(number) in str(error) for number in _FULL)
        if not full and code is None:
            raise
        detail = " ".join(str(error).split())
        reason = "the disk is full" if full else f"it cannot be written ({detail})"
        cure = "free some space" if full else "choose another place"
        raise StorageError(
            f"could not write {path}: {reason}; what was written before is intact: {cure} and run again"
        ) from error


def cache_root() -> Path:
    """What can be made again: $PACELINE_CACHE, else ~/.cache/paceline."""
    return Path(os.environ.get("PACELINE_CACHE") or Path.home() / ".cache" / "paceline")


def atomic_write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all.

    Raises:
        StorageError: the disk is full, or the place cannot be written or is no ordinary file.
    """
    with storage_errors(path):
        if path.is_symlink():
            path = path.resolve()  # the file behind it is replaced, and the link stays
        if path.exists() and not path.is_file():  # such as /dev/null, which others need as it is
            raise FileExistsError(errno.EEXIST, "this is no ordinary file", str(path))
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as stream:
                stream.write(text)
                stream.flush()
                os.fsync(stream.fileno())
            # mkstemp makes files that nobody else can read.
            Path(name).chmod(0o644)
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise


@contextlib.contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """Yield a scratch directory that becomes `path` when the block ends without an error.

    An existing `path` is replaced whole. On any error nothing of the scratch directory remains.
    """
    with storage_errors(path):
        if path.exists() and not path.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "this is no directory", str(path))
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
        try:
            yield scratch
            if path.exists():
                old = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.old."))
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
            path.chmod(0o755)
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)
            raise


@contextlib.contextmanager
def locked(directory: Path, *, wait: bool = False) -> Iterator[None]:
    """Only one process is in this block for this directory, which is made; whoever dies lets go of it.

    Where the file system knows no locks, several may be. A directory that is left empty is removed.

    Raises:
        BlockingIOError: another process is in there, and this one is not to wait.
        StorageError: the directory cannot be made.
    """
    with storage_errors(directory):
        handle = _lock(directory, wait=wait)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # there is something in it
            directory.rmdir()
        os.close(handle)


def _lock(directory: Path, *, wait: bool) -> int:
    """The open directory, which is where its name says also after the wait for it."""
    while True:
        directory.mkdir(parents=True, exist_ok=True)
        try:
            handle = os.open(directory, os.O_RDONLY)
        except FileNotFoundError:
            continue  # whoever was in it left it empty, and removed it
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            if os.path.samestat(os.fstat(handle), directory.stat()):
                return handle
        except BlockingIOError:
            os.close(handle)
            raise
        except FileNotFoundError:
            pass  # removed while this one waited
        except OSError:
            return handle  # no locks here
        os.close(handle)


def append_jsonl(path: Path, row: dict[str, Any]) -> None:
    """Append one row and hand it to the operating system before returning."""
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        _mend_last_line(path)
        with path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(row) + "\n")


def _mend_last_line(path: Path) -> None:
    """Cut off a torn last line, or the next row would be glued to it and both lost."""
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
    """Read rows; a last line torn by a kill is left out.

    Raises:
        UsageError: another line is not JSON.
    """
    if not path.exists():
        return []
    rows: list[dict[str, Any]] = []
    lines = path.read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines):
        if not line:
            continue
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number != len(lines) - 1:
                raise UsageError(
                    f"{path} holds a line that is not JSON (line {number + 1}: {error.msg}); remove it"
                ) from None
    return rows


def config_hash(config: StrictModel) -> str:
    """A short digest of the resolved configuration."""
    text = json.dumps(config.model_dump(mode="json"), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def stamps(path: str) -> list[tuple[str, int, int]]:
    """Name, size and time of a local file, or of the files in a directory; empty where neither is."""
    place = Path(path)
    files = sorted(place.iterdir()) if place.is_dir() else [place]
    found = [(file, file.stat()) for file in files if file.is_file()]
    return [(file.name, status.st_size, status.st_mtime_ns) for file, status in found]


def files_fingerprint(files: Iterable[Path]) -> str:
    """Tells files from others in their place, by names, sizes, beginnings and ends."""
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(_ENDS))
            stream.seek(max(0, size - _ENDS))
            digest.update(stream.read())
    return digest.hexdigest()[:16]


def _kind(config: StrictModel) -> str:
    return type(config).__name__.removesuffix("Config")


class RunDirectory:
    """One run: manifest.json, metrics.jsonl, checkpoints/, result.json."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest = path / "manifest.json"
        self.metrics = path / "metrics.jsonl"
        self.checkpoints = path / "checkpoints"
        self.result = path / "result.json"

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """No other process writes this run meanwhile; whoever dies lets go of it.

        Raises:
            ConfigError: another process is writing it.
            StorageError: the directory cannot be made.
        """
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(locked(self.path))
            except BlockingIOError:
                raise ConfigError(
                    f"output {self.path} is being written by another process; let it end, or choose "
                    "another output"
                ) from None
            yield

    def write_manifest(self, config: StrictModel, **more: str | dict[str, Any]) -> None:
        """Record the resolved configuration, its hash, where it runs, and more by name."""
        content = more | {
            "kind": _kind(config),
            "config": config.model_dump(mode="json"),
            "config_hash": config_hash(config),
            "environment": environment(),
        }
        atomic_write_text(self.manifest, json.dumps(content, indent=2) + "\n")

    def keep_choice(self, name: str, choose: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What the manifest says was chosen under this name; if it says nothing, a new choice.

        The new choice is written into the manifest, so that a resumed run keeps it.
        """
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
        """May this run be written here? -> the manifest of the run that it goes on with, if it does.

        A run that has not begun left nothing that a new start could lose: then another configuration
        of the same kind may take its place.

        Args:
            config: Of this start.
            begun: Whether an earlier start left more than its manifest.
            resume: Whether this one wants to go on with it.
            may_change: Keys that may have other values than before.
            inputs: Fingerprints of the run's inputs by name; an empty one is not compared.

        Raises:
            ConfigError: something else is there, or a run that this one does not go on with.
            StorageError: the place is a file.
        """
        if self.path.exists() and not self.path.is_dir():
            raise StorageError(f"output {self.path} is a file; choose a directory that is new")
        manifest = self.read_manifest()
        if manifest is None:
            there = self.path.iterdir() if self.path.exists() else ()
            if any(not path.name.startswith(".") for path in there):
                raise ConfigError(
                    f"output {self.path} is not empty and holds no run; choose another"
                )
            return None
        before, now = manifest["config"], config.model_dump(mode="json")
        self.check_kind(config)
        if not begun:
            return None
        if not resume:
            raise ConfigError(
                f"output {self.path} already holds a run; resume it, or choose another output"
            )
        keys = sorted(before.keys() | now.keys())
        changed = [k for k in keys if k not in may_change and before.get(k) != now.get(k)]
        if changed:
            key = changed[0]
            raise ConfigError(
                f"output {self.path} holds a run with another {', '.join(changed)} ({key} was "
                f"{before.get(key)}, is now {now.get(key)}); choose another output or the old values"
            )
        recorded = manifest | manifest.get("inputs", {})
        for name, mark in (inputs or {}).items():
            if mark and recorded.get(name, mark) != mark:
                raise ConfigError(
                    f"output {self.path} holds a run with another {name.replace('_', ' ')}: files "
                    "have changed since it began; restore them, or choose another output"
                )
        return manifest

    def check_kind(self, config: StrictModel) -> None:
        """Is there no run of another kind, which this one would write over?

        Raises:
            ConfigError: there is.
        """
        manifest = self.read_manifest()
        if manifest is not None and manifest.get("kind", _kind(config)) != _kind(config):
            raise ConfigError(
                f"output {self.path} holds a run of another kind, {manifest['kind']}; choose another"
            )

    def read_manifest(self) -> dict[str, Any] | None:
        """The manifest of an earlier start of this run, if there was one."""
        if not self.manifest.exists():
            return None
        return json.loads(self.manifest.read_text(encoding="utf-8"))

    def write_result(self, result: dict[str, Any]) -> None:
        """Record what the run found."""
        atomic_write_text(self.result, json.dumps(result, indent=2) + "\n")

    def read_result(self) -> dict[str, Any] | None:
        """The result, if the run has ended."""
        if not self.result.exists():
            return None
        return json.loads(self.result.read_text(encoding="utf-8"))
