"""Files of strangers: written, and refused in one line."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

Run = Callable[..., tuple[int, str, str]]


def write(path: Path, values: Any) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(values))
    return str(path)


def refused(run: Run, *words: str) -> str:
    code, out, err = run(*words)
    assert (code, out) == (2, ""), err
    assert err.count("\n") == 1
    return err
