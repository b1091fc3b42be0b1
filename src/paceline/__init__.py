"""Paceline: draft models that keep up with their target, measured, aligned, decoded and shipped.

The names below are imported when they are used: importing this package does not load torch.
"""

from __future__ import annotations

import importlib
from typing import Any

from paceline.processor import limit_libraries

limit_libraries()

__version__ = "0.1.0"

_HOMES = {
    "core.rules": ["Lenient", "Lossless", "Lossy", "Chow", "Diff", "Opt", "TokenV3"],
    "core.sampling": ["SamplingParams"],
    "decode": ["AutoregressiveDecoder", "SpeculativeDecoder"],
    "models": ["load_model", "prepare_for_decoding", "wrap_model"],
    "train": ["AlignConfig", "PretrainConfig", "align", "pretrain"],
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    return getattr(importlib.import_module(f"paceline.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME_OF])
