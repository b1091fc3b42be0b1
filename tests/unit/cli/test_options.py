"""What the file says, what an option says, and which of them holds."""

from pathlib import Path
from typing import Any

import pytest

from paceline.bench.tune import TuneConfig
from paceline.cli.options import Variant, build

FILE = """
target: a
draft: b
output: out
task: {task: arithmetic, min_terms: 4}
quality_floor: 0.98
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tune.yaml"
    path.write_text(FILE, encoding="utf-8")
    return path


def made(file: Path, **chosen: Any) -> TuneConfig:
    bounds = ("quality_floor", "absolute_quality", "max_latency")
    return build(TuneConfig, file, None, one_of=bounds, chosen=chosen)


def test_an_option_of_several_takes_the_place_of_the_file_s(file: Path):
    assert made(file).quality_floor == 0.98
    found = made(file, max_latency=0.8)
    assert (found.quality_floor, found.max_latency) == (None, 0.8)
    assert made(file, quality_floor=0.9).quality_floor == 0.9


def test_another_choice_takes_the_place_of_the_file_s_and_the_same_keeps_it(file: Path):
    same = made(file, task=Variant("task", "arithmetic")).task
    assert same == made(file).task
    assert made(file, task=Variant("task", "docstrings")).task.task == "docstrings"
    file.write_text(FILE.replace("{task: arithmetic, min_terms: 4}", "arithmetic"))
    assert made(file, task=Variant("task", "docstrings")).task.task == "docstrings"
    assert made(file, task=Variant("task", "arithmetic")).task.task == "arithmetic"
