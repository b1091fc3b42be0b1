"""Directories and files of models: changes of their settings, and what is said of wrong ones."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import ModelLoadError, PacelineError
from paceline.models import load_model


def edit(file: Path, **changes: Any) -> None:
    """Set values of a JSON object; the file need not exist."""
    known = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(known | changes))


def fails(
    path: object,
    *parts: str,
    error: type[PacelineError] = ModelLoadError,
    load: Callable[[Any], Any] = load_model,
) -> str:
    """Loading this place gives one line with these parts in it."""
    with pytest.raises(error) as caught:
        load(path)
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message
    return message
