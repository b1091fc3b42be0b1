"""The cache belongs to this user alone."""

import os
import stat
from pathlib import Path

import pytest

from paceline.cache import cached_directory, cached_text, keep_text


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "made" / "cache"
    monkeypatch.setenv("PACELINE_CACHE", str(root))
    return root


def fill(folder: Path) -> None:
    (folder / "config.json").write_text("{}")


def test_no_other_user_reaches_the_cache_whatever_the_umask(root: Path):
    before = os.umask(0)
    try:
        keep_text("admission", "a.json", "{}")
        cached_directory("gguf", "model", fill)
    finally:
        os.umask(before)
    for path in (root, *root.iterdir()):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700, path


def test_what_is_kept_is_found_and_a_directory_is_filled_once(root: Path):
    assert cached_text("kept", "a.json") is None
    for text in ("old", "new"):
        keep_text("kept", "a.json", text)
        assert cached_text("kept", "a.json") == text
    folder = cached_directory("gguf", "model", fill)
    assert cached_directory("gguf", "model", lambda _: pytest.fail("filled again")) == folder
    assert folder == root / "gguf/model"
    folder.rename(root / "gguf/.model.killed")  # what a killed run leaves is swept up
    assert cached_directory("gguf", "model", fill) == folder
    assert not (root / "gguf/.model.killed").exists()


def test_a_cache_that_cannot_be_written_keeps_no_text_and_is_no_error(root: Path):
    root.parent.mkdir()
    root.touch()
    keep_text("kept", "a.json", "{}")
    assert cached_text("kept", "a.json") is None
