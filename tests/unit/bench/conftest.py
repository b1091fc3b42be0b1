"""Models and questions of the benches of these tests."""

from pathlib import Path

import pytest

from support.runs import QUESTIONS, write_corpus


@pytest.fixture(scope="module")
def folder(folder: Path) -> Path:
    """A tiny pair and `questions.jsonl`."""
    write_corpus(folder / "questions.jsonl", QUESTIONS)
    return folder
