"""Models and questions of the benches of these tests."""

from pathlib import Path

import pytest

from support.data import write_lines
from support.runs import QUESTIONS


@pytest.fixture(scope="module")
def folder(folder: Path) -> Path:
    """A tiny pair and `questions.jsonl`."""
    write_lines(folder / "questions.jsonl", *QUESTIONS)
    return folder
