"""Paceline: measure, align, decode and export draft models for speculative decoding.

The public names are imported on first use: importing this package does not load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from paceline.processor import limit_libraries
from paceline.version import __version__ as __version__

if TYPE_CHECKING:
    from paceline.core.rules import Chow as Chow
    from paceline.core.rules import Diff as Diff
    from paceline.core.rules import Lenient as Lenient
    from paceline.core.rules import Lossless as Lossless
    from paceline.core.rules import Lossy as Lossy
    from paceline.core.rules import Opt as Opt
    from paceline.core.rules import TokenV3 as TokenV3
    from paceline.core.sampling import SamplingParams as SamplingParams
    from paceline.decode import AutoregressiveDecoder as AutoregressiveDecoder
    from paceline.decode import SpeculativeDecoder as SpeculativeDecoder
    from paceline.models import load_model as load_model
    from paceline.models import prepare_for_decoding as prepare_for_decoding
    from paceline.models import wrap_model as wrap_model
    from paceline.train import AlignConfig as AlignConfig
    from paceline.train import PretrainConfig as PretrainConfig
    from paceline.train import align as align
    from paceline.train import pretrain as pretrain

limit_libraries()

_MODULES = {
    "core.rules": ["Lenient", "Lossless", "Lossy", "Chow", "Diff", "Opt", "TokenV3"],
    "core.sampling": ["SamplingParams"],
    "decode": ["AutoregressiveDecoder", "SpeculativeDecoder"],
    "models": ["load_model", "prepare_for_decoding", "wrap_model"],
    "train": ["AlignConfig", "PretrainConfig", "align", "pretrain"],
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    return getattr(importlib.import_module(f"paceline.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULE_OF])
