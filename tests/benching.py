"""A tiny pair with questions, and benches of it in float32 on the CPU."""

from pathlib import Path
from typing import Any

from aligning import write_corpus, write_pair
from paceline.bench import BenchConfig
from paceline.config import validate

QUESTIONS = [
    {"prompt": f"the {a} sat near the {b}", "completion": f" and then the {b} ran"}
    for a in ("cat", "hen", "man")
    for b in ("inn", "tin", "pan")
]


def write_bench_pair(folder: Path) -> Path:
    """The pair and `questions.jsonl`. -> its directory."""
    place = write_pair(folder)
    write_corpus(place / "questions.jsonl", QUESTIONS)
    return place


def bench_config(folder: Path, output: Path, grid: dict[str, Any], **changes: Any) -> BenchConfig:
    """Five examples, of which two are timed."""
    values: dict[str, Any] = {
        "target": str(folder / "target"),
        "draft": str(folder / "draft"),
        "task": {"task": "pairs", "corpus": str(folder / "questions.jsonl"), "metric": "rouge1"},
        "output": output,
        "grid": grid,
        "num_examples": 5,
        "num_timed": 2,
        "max_new_tokens": 9,
        "dtype": "float32",
        "device": "cpu",
    }
    return validate(BenchConfig, values | changes)
