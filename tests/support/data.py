"""Configurations of generate-data, and what it wrote."""

import json
from pathlib import Path
from typing import Any

from pyarrow import parquet

from paceline.data.answering import Answer
from paceline.data.requests import GenerateDataConfig

WORDS = ("cat", "hat", "pan", "tin", "inn", "hen", "rain", "river", "thread", "barn", "sat")
"""Of the 11 prompts, `the cat` to `the sat`."""


def generation(folder: Path, output: Path, **changes: Any) -> GenerateDataConfig:
    """22 answers of a pair's target to the prompts in its folder."""
    values: dict[str, Any] = {
        "target": str(folder / "target"),
        "output": str(output),
        "prompts": str(folder / "prompts.jsonl"),
        "temperatures": [0, 1],
        "num_per_prompt": 2,
        "max_prompt_tokens": 8,
        "max_new_tokens": 12,
        "shard_size": 4,
    }
    return GenerateDataConfig(**values | changes)


def answers(run: Path) -> list[Answer]:
    """All records of a run, in the order of its files."""
    tables = map(parquet.read_table, sorted((run / "data").glob("*.parquet")))
    return [Answer(**row) for table in tables for row in table.to_pylist()]


def write_lines(path: Path, *rows: Any) -> Path:
    """Write JSON lines."""
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
