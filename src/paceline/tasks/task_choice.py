"""Builds tasks from configuration values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from paceline.config import StrictModel, validate
from paceline.extensions import variants
from paceline.tasks.arithmetic import Arithmetic
from paceline.tasks.base import OwnTask, Task
from paceline.tasks.code_problems import Code
from paceline.tasks.corpora import Pairs, PlainText
from paceline.tasks.docstrings import Docstrings
from paceline.tasks.math_problems import GSMSymbolic, Math
from paceline.tasks.open_chat import Chat
from paceline.tasks.questions import Questions
from paceline.tasks.summarization import Summarization
from paceline.tasks.translation import Translation

if TYPE_CHECKING:
    from collections.abc import Mapping

AnyTask: TypeAlias = (
    Arithmetic
    | Docstrings
    | PlainText
    | Pairs
    | Translation
    | Summarization
    | Math
    | GSMSymbolic
    | Questions
    | Code
    | Chat
)


if TYPE_CHECKING:
    TaskChoice: TypeAlias = Task
else:
    TaskChoice = variants(AnyTask, "task", OwnTask)
    """Type of a configuration field; a name selects the task with its defaults."""


class _Choice(StrictModel):
    task: TaskChoice


def build_task(chosen: str | Mapping[str, Any]) -> Task:
    """Build a task from its name or its settings, such as `{"task": "docstrings"}`.

    Raises:
        ConfigError: unknown task or invalid value.
    """
    return validate(_Choice, {"task": chosen if isinstance(chosen, str) else dict(chosen)}).task
