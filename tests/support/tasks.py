"""Data of tasks on disk, and their examples."""

from pathlib import Path
from typing import Any

from paceline.data import CorpusConfig
from paceline.data.prompts import Record
from paceline.tasks import TaskExample
from support.data import write_lines


def corpus(path: Path, *rows: dict[str, Any], **settings: Any) -> CorpusConfig:
    """A file of rows."""
    return CorpusConfig(path=str(write_lines(path, *rows)), **settings)


def pair(number: int) -> dict[str, str]:
    return {"prompt": f"Haus {number}", "completion": f"house {number}"}


def example(*references: str, text: str = "") -> TaskExample:
    """An example with these references."""
    return TaskExample(Record("row", "prompt", text=text), references[0], references[1:])


def texts(examples: list[TaskExample]) -> list[str]:
    return [str(example.record.text) for example in examples]
