"""Prompts beside the pair, and clients that wait shortly."""

from pathlib import Path

import pytest

from paceline.engines import text_servers
from support.data import WORDS, write_lines


@pytest.fixture(scope="module")
def folder(folder: Path) -> Path:
    write_lines(folder / "prompts.jsonl", *[{"prompt": f"the {word}"} for word in WORDS])
    return folder


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_servers, "_PAUSE_S", 0.05)
