"""What a file may not decide: code to import, programs to start, and who gets a key.

All that Paceline reads is data. Modules and programs are permitted by `--allow-import`,
`--allow-program` or an environment variable, which processes started by this one inherit. The
command line consents to run what a model writes, and names a key with the server that gets it.
"""

from __future__ import annotations

import os
from enum import Enum, auto
from typing import Any, cast

from paceline.errors import ConfigError

IMPORTS = "PACELINE_IMPORTS"
"""Environment variable: Python modules that `import:` may name, separated by commas."""
PROGRAMS = "PACELINE_PROGRAMS"
"""Environment variable: programs that may be started, such as engines, separated by commas."""
EXECUTION = "PACELINE_EXECUTION"
"""Environment variable: 1 permits code tasks that only a file allows."""


class Origin(Enum):
    """Where validated values come from, as the context of pydantic's validation.

    Values without an origin come from Python code.
    """

    CONFIGURATION = auto()
    """A configuration file, or text of the command line."""
    RESULTS = auto()
    """Rows and manifests: a variant that is not permitted stays a dictionary."""


def allow(variable: str, *names: str) -> None:
    """Permit names in this process and in those that it starts. `variable`: IMPORTS or PROGRAMS."""
    os.environ[variable] = ",".join(dict.fromkeys((*allowed(variable), *names)))


def allowed(variable: str) -> tuple[str, ...]:
    """The permitted names. `variable`: IMPORTS or PROGRAMS."""
    found = os.environ.get(variable, "").split(",")
    return tuple(name.strip() for name in found if name.strip())


def check_consent(values: Any, given: Any, where: str = "") -> None:
    """Raise ConfigError if values allow programs of a model, or send a key, by a file alone.

    `given`: the part of them that the command line names.
    """
    if isinstance(values, list):
        for at, value in enumerate(values):
            check_consent(value, value if values == given else None, f"{where}{at}.")
    if not isinstance(values, dict):
        return
    found, named = cast("dict[str, Any]", values), given if isinstance(given, dict) else {}
    for key, value in found.items():
        check_consent(value, named.get(key), f"{where}{key}.")
    execution = found.get("allow_execution")
    if execution and not (named.get("allow_execution") or "1" in allowed(EXECUTION)):
        raise ConfigError(
            "a file may not allow that programs of a model run; if you want that, add --set "
            f"{where}allow_execution=true"
        )
    variable, url = found.get("api_key_env"), found.get("url")
    if variable is None:
        return
    if (named.get("api_key_env"), named.get("url")) != (variable, url):
        raise ConfigError(
            f"a file may not send the key in {variable}, or name who gets it; if you trust the "
            f"server, add --set {where}api_key_env={variable} --set {where}url=URL"
        )
