"""The commands of docs/guides/tasks.md are valid, and set what the guide says."""

import itertools
import shlex
from pathlib import Path
from typing import Any

import pytest

from paceline.bench import BenchConfig
from paceline.cli.options import build
from paceline.config import apply_override
from paceline.tasks import build_task

GUIDE = Path(__file__).parents[3] / "docs/guides/tasks.md"


def commands() -> list[list[str]]:
    blocks = GUIDE.read_text().split("```")[1::2]
    lines = (line for block in blocks for line in block.replace("\\\n", " ").splitlines())
    return [shlex.split(line) for line in lines if line.startswith("paceline ")]


COMMANDS = commands()


def options(words: list[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, value in itertools.pairwise(words):
        if name.startswith("--"):
            found.setdefault(name.removeprefix("--"), []).append(value)
    return found


@pytest.mark.parametrize("words", [words for words in COMMANDS if words[1] == "task"], ids=" ".join)
def test_a_task_of_the_guide_can_be_made(words: list[str]):
    """surface/test_site.py builds the configurations of the other commands."""
    values: dict[str, Any] = {"task": words[2]}
    for override in options(words).get("set", ()):
        apply_override(values, override)
    assert build_task(values).task == words[2]


def test_the_guide_has_a_command_for_every_task_and_its_templates_have_line_breaks():
    tasks: dict[str, Any] = {}
    for words in COMMANDS:
        given = options(words)
        if words[1] == "bench":
            models = {name: given[name][0] for name in ("target", "draft", "output")}
            task = build(BenchConfig, None, given["set"], chosen=models).task
            tasks[task.task] = task
    assert set(tasks) == {"translation", "summarization", "math", "questions", "code", "text"}
    assert tasks["questions"].prompt == "{context}\n\nQuestion: {source}\nAnswer:"
    assert tasks["questions"].stop == ("\n",)
    assert tasks["translation"].corpus.prompt_field == "translation.de"
    assert tasks["translation"].corpus.subset == "de-en"
    assert tasks["translation"].prompt == "translate German to English: {source}"
    assert tasks["code"].allow_execution
