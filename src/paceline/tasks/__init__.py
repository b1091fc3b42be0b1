"""Tasks: sets of prompts with a metric for the answers, and tasks as configuration values.

base.py           interface of tasks; examples: their choice, their prompts in tokens, their scores
math_problems.py  word problems and step-by-step sums, scored by accuracy
corpora.py        a user's own prompts, or prompt-answer pairs with a metric
row_task.py       rows of a data set: translation (BLEU, chrF), summaries (ROUGE), questions (F1)
code_problems.py  functions, scored by running their tests in a limited process
scoring.py        metrics and the libraries that compute them; figures of all answers together
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from paceline.config import StrictModel
from paceline.extensions import variants
from paceline.tasks.base import OwnTask, Split, Task, TaskExample, write_examples
from paceline.tasks.code_problems import Code
from paceline.tasks.corpora import Pairs, PlainText
from paceline.tasks.math_problems import Arithmetic, Math
from paceline.tasks.row_task import Questions, Summarization, Translation

if TYPE_CHECKING:
    from collections.abc import Mapping

AnyTask: TypeAlias = (
    Arithmetic | PlainText | Pairs | Translation | Summarization | Math | Questions | Code
)


if TYPE_CHECKING:
    TaskChoice: TypeAlias = Task
else:
    TaskChoice = variants(AnyTask, "task", OwnTask)
    """Type of a configuration field; a name selects the task with its defaults."""


class _Choice(StrictModel):
    task: TaskChoice


def build_task(chosen: str | Mapping[str, Any]) -> Task:
    """Build a task from its name or its settings, such as `{"task": "arithmetic"}`.

    Raises:
        ConfigError: unknown task or invalid value.
    """
    return _Choice(task=chosen if isinstance(chosen, str) else dict(chosen)).task  # pyright: ignore


__all__ = [
    "AnyTask",
    "Arithmetic",
    "Code",
    "Math",
    "OwnTask",
    "Pairs",
    "PlainText",
    "Questions",
    "Split",
    "Summarization",
    "Task",
    "TaskChoice",
    "TaskExample",
    "Translation",
    "build_task",
    "write_examples",
]
