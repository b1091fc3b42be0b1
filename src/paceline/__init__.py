"""Paceline: measure, align, decode and export draft models for speculative decoding.

The public names are imported on first use: importing this package does not load torch.
`paceline.measure`, `paceline.export` and `paceline.bench` are packages, so their functions are
`measure_draft`, `export_draft` and `run_bench` here.
"""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path
from typing import Any

from paceline.processor import limit_libraries
from paceline.version import __version__ as __version__

limit_libraries()

_HOMES = {
    alias.name: node.module
    for node in ast.parse(Path(__file__).with_suffix(".pyi").read_text("utf-8")).body
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
}
"""The module of each name, as the stub for type checkers has them."""
_PACKAGES = {name for name, module in _HOMES.items() if module == "paceline"}

__all__ = sorted(_HOMES.keys() - _PACKAGES - {"__version__"})  # pyright: ignore


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(f"paceline.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    return getattr(importlib.import_module(f"{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*filter(re.compile("__").match, globals()), *_HOMES, "errors"})
