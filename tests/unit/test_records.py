"""What is written to disk is whole or not there at all."""

import errno
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from paceline.cache import cached_directory, cached_text, keep_text
from paceline.config import StrictModel, read_yaml
from paceline.environment import _git_state, begin, environment
from paceline.errors import ConfigError, StorageError, UsageError
from paceline.places import TEMPLATES, copy_files, shipped
from paceline.records import (
    RunDirectory,
    append_jsonl,
    atomic_directory,
    atomic_write_bytes,
    atomic_write_text,
    cache_root,
    config_hash,
    locked,
    read_jsonl,
    storage_errors,
)

ROOT = Path(__file__).parents[2]


class Settings(StrictModel):
    steps: int = 3
    name: str = "a"


def names(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


def test_a_file_is_written_with_its_parents_and_replaced_whole(tmp_path: Path):
    path = tmp_path / "deep" / "er" / "file.txt"
    atomic_write_text(path, "first ü\n")
    atomic_write_text(path, "second\n")
    assert path.read_text(encoding="utf-8") == "second\n"
    assert names(path.parent) == ["file.txt"]
    atomic_write_bytes(path, b"\xff\r\n")
    assert path.read_bytes() == b"\xff\r\n"


@pytest.mark.parametrize("umask", [0o077, 0o022, 0o002])
def test_the_umask_says_who_may_read_what_was_written(tmp_path: Path, umask: int):
    before = os.umask(umask)
    try:
        for _ in range(2):  # new, and replaced
            atomic_write_text(tmp_path / "file.txt", "x")
            with atomic_directory(tmp_path / "dir"):
                pass
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file.txt").stat().st_mode) == 0o666 & ~umask
    assert stat.S_IMODE((tmp_path / "dir").stat().st_mode) == 0o777 & ~umask


def test_a_full_disk_is_one_line_and_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "file.txt"
    atomic_write_text(path, "old")

    def full(_handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match="the disk is full") as caught:
        atomic_write_text(path, "new")
    assert str(path) in str(caught.value)
    assert caught.value.exit_code == 3
    assert path.read_text(encoding="utf-8") == "old"
    assert names(tmp_path) == ["file.txt"]
    of_a_library = "Error while serializing: I/O error: No space left on device (os error 28)"
    with pytest.raises(StorageError, match="the disk is full"), storage_errors(path):
        raise RuntimeError(of_a_library)


def test_an_existing_directory_is_replaced_and_nothing_of_it_stays(tmp_path: Path):
    path = tmp_path / "out"
    for name in ("first", "second"):
        with atomic_directory(path) as scratch:
            (scratch / name).write_text(name, encoding="utf-8")
    assert names(path) == ["second"]
    assert names(tmp_path) == ["out"]


def test_the_files_of_a_directory_are_on_the_disk_before_it_appears(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path, flushed = tmp_path / "runs" / "out", list[int]()

    def fsync(handle: int) -> None:
        assert not path.exists()
        flushed.append(os.fstat(handle).st_ino)

    monkeypatch.setattr(os, "fsync", fsync)
    with atomic_directory(path) as scratch:
        (scratch / "deep").mkdir()
        for name in ("weights", "deep/state"):
            (scratch / name).write_text("w")
    inodes = {(path / name).stat().st_ino for name in ("weights", "deep/state")}
    assert set(flushed) == inodes


@pytest.mark.parametrize("error", [ValueError("boom"), KeyboardInterrupt(), SystemExit(1)])
def test_an_error_inside_leaves_the_old_directory_and_no_trace(
    tmp_path: Path, error: BaseException
):
    path = tmp_path / "out"
    with atomic_directory(path) as scratch:
        (scratch / "old").write_text("old", encoding="utf-8")

    def write_half() -> None:
        with atomic_directory(path) as scratch:
            (scratch / "new").write_text("half", encoding="utf-8")
            raise error

    with pytest.raises(type(error)):
        write_half()
    assert names(tmp_path) == ["out"]
    assert names(path) == ["old"]


def test_a_failure_while_directories_change_places_brings_the_old_one_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "out"
    with atomic_directory(path) as scratch:
        (scratch / "old").write_text("old", encoding="utf-8")
    replace = Path.replace
    moves: list[Path] = []

    def second_move_fails(self: Path, target: Path) -> Path:
        moves.append(self)
        if len(moves) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", second_move_fails)
    with pytest.raises(StorageError, match="the disk is full"), atomic_directory(path):
        pass
    assert names(path) == ["old"]
    assert names(tmp_path) == ["out"]


@pytest.mark.parametrize("torn", ["", '{"step": 3, "lo', "{", '{"step": 3'])
def test_rows_are_read_back_in_order_and_a_torn_last_line_is_left_out(tmp_path: Path, torn: str):
    """The next row does not stick to it."""
    path = tmp_path / "runs" / "metrics.jsonl"
    rows = [{"step": 1, "loss": 0.1}, {"text": 'ü "\n'}, {"nested": {"list": [1, None]}}]
    append_jsonl(path, rows[0])
    append_jsonl(path, rows[1])
    with path.open("a", encoding="utf-8") as stream:
        stream.write(torn)
    assert read_jsonl(path) == rows[:2]
    append_jsonl(path, rows[2])
    assert read_jsonl(path) == rows


@pytest.mark.parametrize("line", [b"[" * 5000, b"9" * 5000, b"\xff", b"[1]", b"null", b'{"st'])
def test_a_line_that_is_no_object_is_one_line(tmp_path: Path, line: bytes):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + line + b'\n{"step": 3}\n')
    with pytest.raises(UsageError, match="; remove it"):
        read_jsonl(path)


def test_a_run_directory_keeps_its_manifest_and_result(tmp_path: Path):
    run = RunDirectory(tmp_path / "run")
    assert run.read_manifest() is None
    assert run.read_result() is None
    run.write_manifest(Settings(steps=5))
    run.write_result({"alpha": 0.5})
    manifest = run.read_manifest()
    assert manifest is not None
    assert manifest["config"] == {"steps": 5, "name": "a"}
    assert manifest["config_hash"] == config_hash(Settings(name="a", steps=5))
    assert manifest["config_hash"] != config_hash(Settings(steps=4))
    assert set(manifest["environment"]) >= {"versions", "python", "cpu_count", "git"}
    assert run.read_result() == {"alpha": 0.5}
    assert names(run.path) == ["manifest.json", "result.json"]
    assert (run.metrics.name, run.checkpoints.name) == ("metrics.jsonl", "checkpoints")


@pytest.mark.parametrize(
    ("place", "is_ours"),
    [
        ("src", True),
        (".venv/lib/python3.11/site-packages", False),
        ("vendor/src", False),
        ("worktree/src", True),
    ],
)
def test_only_a_checkout_of_its_own_gives_the_commit_and_is_asked(
    place: str, is_ours: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A repository around an installed package is another's, whose settings name a program."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
        return subprocess.run([*command, *arguments], capture_output=True, text=True).stdout.strip()

    git("init")
    git("commit", "--allow-empty", "--message=a")
    git("worktree", "add", "--detach", "worktree")
    package = tmp_path / place / "paceline"
    package.mkdir(parents=True)
    monkeypatch.setattr("paceline.environment.__file__", str(package / "environment.py"))
    clean = {"commit": git("rev-parse", "HEAD"), "modified": False}
    ask = _git_state.__wrapped__
    assert ask() == (clean if is_ours else None)
    (package / "new.py").touch()
    assert ask() == (clean | {"modified": True} if is_ours else None)
    if not is_ours:
        git("config", "core.fsmonitor", f"touch {tmp_path}/marker; false")
        ask()
        assert not (tmp_path / "marker").exists()


def test_the_environment_can_be_written_as_json():
    described = json.loads(json.dumps(environment()))
    assert described["versions"]["torch"]
    assert described["cpu_count"] == os.cpu_count()
    assert "began" not in described
    with begin({"environment": described | {"began": "2026-11-28 23:59:59"}}):
        assert environment() == described | {"began": "2026-11-28 23:59:59"}


def test_the_environment_names_the_gpu_of_a_process_that_has_used_it(
    monkeypatch: pytest.MonkeyPatch,
):
    names = ["NVIDIA H100", "NVIDIA H100", "NVIDIA L4"]
    monkeypatch.setattr(torch.cuda, "get_device_name", names.__getitem__)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert "gpu" not in environment()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert environment()["gpu"] == "NVIDIA H100, NVIDIA L4"


_HOLD = """
import sys, time
from pathlib import Path
from paceline.records import RunDirectory
with RunDirectory(Path(sys.argv[1])).alone():
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_run_is_written_by_one_process_and_a_killed_one_lets_go(tmp_path: Path):
    run = RunDirectory(tmp_path / "run")
    command = [sys.executable, "-c", _HOLD, str(run.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout is not None
            assert other.stdout.readline() == "held\n"
            for _ in range(2):  # who is refused leaves the other one's lock as it is
                with pytest.raises(ConfigError, match="written by another process"), run.alone():
                    pass
        finally:
            other.kill()
    with run.alone():
        (run.path / "file").touch()
    assert names(run.path) == [".lock", "file"]


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_lock_ends_though_a_copy_of_the_process_lives(tmp_path: Path):
    ours, theirs = os.pipe()
    with locked(tmp_path / "folder"):
        (tmp_path / "folder" / "file").touch()
        if not (copy := os.fork()):
            os.close(theirs)
            os.read(ours, 1)  # until the test ends
            os._exit(0)
    with locked(tmp_path / "folder"):
        os.close(theirs)
    os.waitpid(copy, 0)
    with pytest.raises(StorageError), locked(tmp_path / "folder" / "file"):
        pass


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("notes.txt", "precious"),
        ("manifest.json", "{}"),
        ("manifest.json", '{"config": {"digest": "sha256:0"}, "schemaVersion": 2}'),
        ("manifest.json", '{"config": 1, "config_hash": "0"}'),
    ],
)
def test_a_directory_of_other_files_is_no_run(tmp_path: Path, name: str, content: str):
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match="is not empty and holds no run; choose another"):
        RunDirectory(tmp_path).check_kind(Settings())
    assert RunDirectory(tmp_path / "new").check_kind(Settings()) is None


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache, at home."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PACELINE_CACHE", "~/made/cache")
    return tmp_path / "made" / "cache"


def test_no_other_user_reaches_the_cache_whatever_the_umask(root: Path):
    before = os.umask(0)
    try:
        keep_text("admission", "a.json", "{}")
        assert cache_root() == root
        cached_directory("gguf", "model", lambda made: (made / "config.json").touch())
    finally:
        os.umask(before)
    for path in (root, *root.iterdir()):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700, path


def test_what_is_kept_is_found_and_a_directory_is_filled_once(root: Path):
    assert cached_text("kept", "a.json") is None
    for text in ("old", "new"):
        keep_text("kept", "a.json", text)
        assert cached_text("kept", "a.json") == text
    folder = cached_directory("gguf", "model", lambda made: (made / "config.json").touch())
    assert cached_directory("gguf", "model", lambda _: pytest.fail("filled again")) == folder
    assert folder == root / "gguf/model"


def test_a_cache_that_cannot_be_written_keeps_no_text_and_is_no_error(root: Path):
    root.parent.mkdir()
    root.touch()
    keep_text("kept", "a.json", "{}")
    assert cached_text("kept", "a.json") is None


def test_a_file_here_is_before_that_of_paceline_and_a_path_of_neither_is_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    quick, other = Path("configs/align/quick.yaml"), Path("configs/align/other.yaml")
    assert shipped(quick).read_text() == (ROOT / quick).read_text()
    assert read_yaml(quick) == yaml.safe_load((ROOT / quick).read_text())
    assert (shipped(other), shipped(tmp_path / quick)) == (other, tmp_path / quick)
    quick.parent.mkdir(parents=True)
    quick.write_text("seed: 5")
    assert read_yaml(quick) == {"seed": 5}


def test_of_directories_only_that_of_templates_is_copied(tmp_path: Path):
    model, out = tmp_path / "model", tmp_path / "out"
    for folder in (model / "tokenizer_extra", model / TEMPLATES, out):
        folder.mkdir(parents=True)
    (model / "merges.txt").write_text("mine")
    (model / "vocab.txt").symlink_to("merges.txt")
    (model / TEMPLATES / "tool_use.jinja").write_text("mine")
    copy_files(sorted(model.iterdir()), out)
    found = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    assert found == {"merges.txt", "vocab.txt", f"{TEMPLATES}/tool_use.jinja"}
    assert not (out / "vocab.txt").is_symlink()
