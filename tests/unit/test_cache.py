"""Of the cache, only what this user alone can have written is used."""

import os
import re
import stat
import warnings
from pathlib import Path

import pytest

from paceline.cache import (
    _warn,
    cache_directory,
    cached_directory,
    cached_text,
    is_cached,
    keep_text,
)
from paceline.cli import crash
from paceline.errors import StorageError

NOBODY = 65534


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    _warn.cache_clear()
    root = tmp_path / "made" / "cache"
    monkeypatch.setenv("PACELINE_CACHE", str(root))
    return root


def spoil(path: Path, fault: str) -> None:
    """Let others write it, or give it to another user, which takes root."""
    if fault == "another's" and os.getuid():
        pytest.skip("only root can give files away")
    elif fault == "another's":
        os.chown(path, NOBODY, -1)
    else:
        path.chmod(path.stat().st_mode | int(fault, 8))


def fill(folder: Path) -> None:
    (folder / "config.json").write_text("{}")


faults = pytest.mark.parametrize("fault", ["020", "002", "another's"])


def test_nothing_of_the_cache_can_be_written_by_others_whatever_the_umask(root: Path):
    before = os.umask(0)
    try:
        keep_text("admission", "a.json", "{}")
        cached_directory("gguf", "model", fill)
        log = crash.write_log(RuntimeError("broken"))
    finally:
        os.umask(before)
    assert log is not None
    assert log.parent == root / "logs"
    for path in (root, *root.rglob("*")):
        assert not stat.S_IMODE(path.stat().st_mode) & 0o022, path
    assert stat.S_IMODE(root.stat().st_mode) == 0o700


@faults
@pytest.mark.parametrize("place", ["", "kept"])
def test_a_cache_that_others_may_write_is_not_used_and_one_line_says_so(
    root: Path, place: str, fault: str
):
    keep_text("kept", "a.json", "true")
    spoil(root / place, fault)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert cached_text("kept", "a.json") is None
        assert cache_directory("kept") is None
        keep_text("kept", "b.json", "true")
    (said,) = [str(each.message) for each in told]
    assert re.search(r"is not used.* set PACELINE_CACHE .*chmod -R go-w", said)
    assert [path.name for path in (root / "kept").iterdir()] == ["a.json"]


@faults
def test_a_result_that_others_may_write_is_not_read_but_written_again(root: Path, fault: str):
    keep_text("kept", "a.json", "old")
    assert cached_text("kept", "a.json") == "old"
    spoil(root / "kept/a.json", fault)
    assert cached_text("kept", "a.json") is None
    keep_text("kept", "a.json", "new")
    assert cached_text("kept", "a.json") == "new"


@faults
@pytest.mark.parametrize("place", ["gguf", "gguf/model", "gguf/model/config.json"])
def test_a_converted_model_that_others_may_write_is_one_line(root: Path, place: str, fault: str):
    folder = cached_directory("gguf", "model", fill)
    assert cached_directory("gguf", "model", fill) == folder
    spoil(root / place, fault)
    if place == "gguf":
        with pytest.warns(UserWarning, match="is not used"):
            assert not is_cached("gguf", "model")
    with pytest.raises(StorageError, match="may write to it") as caught:
        cached_directory("gguf", "model", fill)
    assert "\n" not in str(caught.value)


def test_a_traceback_goes_through_no_planted_link(root: Path, monkeypatch: pytest.MonkeyPatch):
    """Neither in the cache nor in the temporary directory that replaces it."""
    monkeypatch.setattr("time.strftime", lambda *_: "paceline-20260101-000000-")
    root.mkdir(mode=0o777, parents=True)
    root.chmod(0o777)
    victim, temporary = root / "victim", root / "tmp"
    temporary.mkdir()
    victim.write_text("precious")
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    for number in (os.getpid(), ""):
        (temporary / f"paceline-20260101-000000-{number}.log").symlink_to(victim)
    with pytest.warns(UserWarning, match="is not used"):
        log = crash.write_log(RuntimeError("broken"))
    assert log is not None
    assert log.parent == temporary
    assert stat.S_IMODE(log.stat().st_mode) == 0o600
    assert "RuntimeError: broken" in log.read_text()
    assert victim.read_text() == "precious"
