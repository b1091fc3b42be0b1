"""What a file may not decide: code to import, programs to start, and keys to send.

Configurations, result rows and manifests are untrusted input. A file may name code or a program of
its author, but only the user permits it: on the command line, where `Given` marks every text, or
by an environment variable, which processes started by this one inherit.
"""

from __future__ import annotations

import os
from enum import Enum, auto
from typing import Any, cast

IMPORTS = "PACELINE_IMPORTS"
"""Environment variable: Python modules that `import:` may name, separated by commas."""
PROGRAMS = "PACELINE_PROGRAMS"
"""Environment variable: programs that a file may start as an engine, separated by commas."""
EXECUTION = "PACELINE_EXECUTION"
"""Environment variable: 1 permits code tasks that only a file allows."""
_CONSENT = "allow_execution"


class Origin(Enum):
    """Where validated values come from, as the context of pydantic's validation.

    Values without an origin come from Python code.
    """

    CONFIGURATION = auto()
    """A configuration file, or text of the command line, which is `Given`."""
    RESULTS = auto()
    """Rows and manifests: nothing that they name is imported without permission."""


class Given(str):
    """A text from the command line."""

    __slots__ = ()


def given(value: Any) -> Any:
    """Mark all texts in a value of the command line."""
    if isinstance(value, str):
        return Given(value)
    if isinstance(value, list):
        return [given(part) for part in cast("list[Any]", value)]
    if isinstance(value, dict):
        return {key: given(part) for key, part in cast("dict[Any, Any]", value).items()}
    return value


def is_given(value: Any) -> bool:
    """True for texts of the command line, lists of them, and None; a file has other types, too."""
    if isinstance(value, list | tuple):
        return all(is_given(part) for part in cast("list[Any]", value))
    return value is None or isinstance(value, Given)


def without_consent(value: Any) -> Any:
    """What a file holds, without the consent to run programs that only its reader can give."""
    if isinstance(value, list):
        return [without_consent(part) for part in cast("list[Any]", value)]
    if isinstance(value, dict) and not allowed(EXECUTION):
        known = cast("dict[Any, Any]", value)
        return {key: without_consent(part) for key, part in known.items() if key != _CONSENT}
    return value


def allow(variable: str, *names: str) -> None:
    """Permit names in this process and in those that it starts. `variable`: IMPORTS or PROGRAMS."""
    os.environ[variable] = ",".join(dict.fromkeys((*allowed(variable), *names)))


def allowed(variable: str) -> tuple[str, ...]:
    """The permitted names. `variable`: IMPORTS or PROGRAMS."""
    found = os.environ.get(variable, "").split(",")
    return tuple(name.strip() for name in found if name.strip())
