"""Every task as a choice that a file or a command line can hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

from pydantic import BeforeValidator, Field

from paceline.config import StrictModel, validate
from paceline.tasks.arithmetic import Arithmetic
from paceline.tasks.corpora import Pairs, PlainText
from paceline.tasks.docstrings import Docstrings

if TYPE_CHECKING:
    from collections.abc import Mapping

AnyTask: TypeAlias = Arithmetic | Docstrings | PlainText | Pairs


def _name_alone(value: Any) -> Any:
    return {"task": value} if isinstance(value, str) else value


TaskChoice = Annotated[AnyTask, Field(discriminator="task"), BeforeValidator(_name_alone)]
"""For a field of a configuration; a name stands for the task with its defaults."""


class _Choice(StrictModel):
    task: TaskChoice


def build_task(chosen: str | Mapping[str, Any]) -> AnyTask:
    """The task of that name, or that these values describe, such as `{"task": "docstrings"}`.

    Raises:
        ConfigError: no such task, or a value is wrong.
    """
    return validate(_Choice, {"task": chosen if isinstance(chosen, str) else dict(chosen)}).task
