"""Which compiled calls a test makes."""

from typing import Any

import pytest

from paceline.models.llama.cpu import NativeLlama


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The compiled calls that were made."""
    made: list[str] = []
    for name in ("draw", "verify"):
        whole = getattr(NativeLlama, name)

        def spy(*given: Any, name: str = name, whole: Any = whole, **named: Any) -> Any:
            made.append(name)
            return whole(*given, **named)

        monkeypatch.setattr(NativeLlama, name, spy)
    return made
