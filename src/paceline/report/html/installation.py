"""Checks for the libraries of HTML reports before a long command starts."""

from __future__ import annotations

from importlib.util import find_spec

from paceline.errors import UsageError

_LIBRARIES = ("altair", "vl_convert", "jinja2")


def require() -> None:
    """Check that an HTML report can be made; raises UsageError if a library is not installed."""
    missing = [name for name in _LIBRARIES if find_spec(name) is None]
    if missing:
        raise UsageError(
            f"HTML reports need {', '.join(missing)}; install with: pip install 'paceline[report]'"
        )
